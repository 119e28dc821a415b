package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/libvirt"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

const (
	// rated is the number of VMs that steadyRate creates, one at each interval of ratedInterval.
	rated         = 100
	ratedInterval = 100 * time.Millisecond
	// ratedMiB is the memory of each of these VMs.
	ratedMiB = 64
	// ratedMachine is the machine type of the guests of libvirt.
	ratedMachine = "pc-q35-7.2"
)

// steadyRate creates and starts VMs at a fixed rate, first with Trivet and then with libvirt. For each VM it measures
// the time from the scheduled start until the VM runs. The disks are blank, so the guests do not boot, and use little
// CPU time of the host that the measured programs need.
func steadyRate(ctx context.Context, b *bench) (err error) {
	c, err := newCloud(ctx, b, "rate")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := c.StartAgent(ctx); err != nil {
		return err
	}
	rest, err := c.Tenant(ctx, 2, "default")
	if err != nil {
		return err
	}
	dir := filepath.Join(b.dir, "libvirt-rate")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	l, err := libvirt.Start(ctx, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	if err := b.Calm.Await(ctx); err != nil {
		return err
	}
	ids := make([]string, rated)
	ours, err := atRate(ctx, func(ctx context.Context, i int) error {
		var vm lab.VM
		if err := rest.Call(ctx, "POST", "/api/v1/vms", ratedBody(i), &vm); err != nil {
			return err
		}
		ids[i] = vm.ID
		if err := rest.Call(ctx, "POST", "/api/v1/vms/"+vm.ID+"/start", nil, nil); err != nil {
			return err
		}
		return c.AwaitState(ctx, vm.ID, vmv1.VmState_VM_STATE_RUNNING)
	})
	if err != nil {
		return err
	}
	if err := c.remove(ctx, ids); err != nil {
		return err
	}
	if err := b.Calm.Await(ctx); err != nil {
		return err
	}
	peer, err := rateOfLibvirt(ctx, l, dir)
	if err != nil {
		return err
	}
	what := fmt.Sprintf("create → RUNNING of %d VMs at %d/s, against `qemu-img create` and `virsh create`", rated, time.Second/ratedInterval)
	b.compare(what, ours, peer, 0)
	b.row(figure.Row{
		What: what + ": p99", Ours: ms(figure.Quantile(ours, 0.99)), Peer: ms(figure.Quantile(peer, 0.99)), Unit: "×",
		Value: figure.Quantile(ours, 0.99).Seconds() / figure.Quantile(peer, 0.99).Seconds(), Note: "blank disks, 64 MiB of memory",
	})
	return nil
}

// ratedBody returns the body of a REST request that creates a VM with a blank disk.
func ratedBody(i int) map[string]any {
	return map[string]any{"name": fmt.Sprintf("rate-%d", i), "memory_mib": ratedMiB, "disks": []any{
		map[string]any{"id": "root", "source": map[string]any{"type": "blank"}, "size_gib": 1},
	}}
}

// atRate calls start for each VM when it is due, also if earlier calls have not returned. It returns the times from the
// instant at which each VM was due until start returned.
func atRate(ctx context.Context, start func(ctx context.Context, i int) error) ([]time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, burstWithin)
	defer cancel()
	took := make([]time.Duration, rated)
	group, ctx := errgroup.WithContext(ctx)
	began := time.Now()
	for i := range took {
		due := began.Add(time.Duration(i) * ratedInterval)
		if err := sleep(ctx, time.Until(due)); err != nil {
			break
		}
		group.Go(func() error {
			err := start(ctx, i)
			took[i] = time.Since(due)
			return err
		})
	}
	return took, group.Wait()
}

func rateOfLibvirt(ctx context.Context, l *libvirt.Daemon, dir string) (_ []time.Duration, err error) {
	var domains []libvirt.Domain
	var files []string
	for i := range rated {
		name := fmt.Sprintf("trivet-bench-%d", i)
		d := libvirt.Domain{
			Name: name, UUID: uuid.NewString(), Machine: ratedMachine, CPUMaximum: true, VCPUs: 1, MemoryMiB: ratedMiB,
			Disk: filepath.Join(dir, name+".qcow2"), Serial: filepath.Join(dir, name+".serial"), Ports: 5, TBSizeMiB: 256,
		}
		file, err := d.Write(dir)
		if err != nil {
			return nil, err
		}
		domains, files = append(domains, d), append(files, file)
	}
	running := make([]bool, rated)
	defer func() {
		for i, d := range domains {
			if running[i] {
				err = errors.Join(err, l.Destroy(context.WithoutCancel(ctx), d.Name))
			}
		}
	}()
	return atRate(ctx, func(ctx context.Context, i int) error {
		out, err := exec.CommandContext(ctx, "qemu-img", "create", "-q", "-f", "qcow2", domains[i].Disk, "1G").CombinedOutput()
		if err != nil {
			return fmt.Errorf("qemu-img create: %w: %s", err, out)
		}
		if err := l.Create(ctx, files[i]); err != nil {
			return err
		}
		running[i] = true
		return nil
	})
}

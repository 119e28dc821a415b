package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/libvirt"
	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

const (
	// burstWithin is the timeout for a step with twenty VMs at once, such as their creation and boot. It suffices on a
	// busy host.
	burstWithin = 4 * time.Minute
	// many is the number of VMs that are created concurrently in a round; burstRounds is the number of rounds.
	many, burstRounds = 20, 3
	// settle is the pause between the boot of the guests and the measurement of the agent while they idle. idleFor is
	// the duration of that measurement.
	settle, idleFor = 15 * time.Second, time.Minute
)

// burst measures how long it takes to create and start many VMs at once, with Trivet and with libvirt, and then the
// agent's memory and CPU while those VMs idle.
func burst(ctx context.Context, b *bench) (err error) {
	c, err := newCloud(ctx, b, "burst")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := c.StartAgent(ctx); err != nil {
		return err
	}
	images, err := lab.ImportGuest(ctx, c.Trio, c.Admin, b.guest)
	if err != nil {
		return err
	}
	rest, err := c.Tenant(ctx, 2, "default")
	if err != nil {
		return err
	}
	dir := filepath.Join(b.dir, "libvirt-burst")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	l, err := libvirt.Start(ctx, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	peer := &crowd{l: l, dir: dir, base: filepath.Join(b.guest, "disk.qcow2")}
	empty, _, err := memory(c.Dir.Running(c.Agent.Name))
	if err != nil {
		return err
	}
	var ours, theirs [burstRounds]round
	we := func(i int) error {
		ids, err := c.crowd(ctx, rest, images.Disk, i, &ours[i])
		if err != nil {
			return err
		}
		r, err := c.Record(ids[0])
		if err != nil {
			return err
		}
		peer.machine = r.Spec.Machine
		if i == burstRounds-1 {
			if err := c.idle(ctx, b, len(ids), empty); err != nil {
				return err
			}
		}
		return c.remove(ctx, ids)
	}
	they := func(i int) error { return peer.round(ctx, &theirs[i]) }
	for i := range burstRounds {
		order := []func(int) error{we, they}
		if i%2 == 1 {
			slices.Reverse(order)
		}
		for _, f := range order {
			if err := b.Calm.Await(ctx); err != nil {
				return err
			}
			if err := f(i); err != nil {
				return err
			}
		}
		report.Say("burst round %d: running after %s, libvirt %s; banners after %s, libvirt %s", i+1,
			ms(ours[i].running), ms(theirs[i].running), ms(ours[i].banners), ms(theirs[i].banners))
	}
	b.rowsOf("all RUNNING", ours[:], theirs[:], func(r round) time.Duration { return r.running })
	b.rowsOf("all banners", ours[:], theirs[:], func(r round) time.Duration { return r.banners })
	return nil
}

func (b *bench) rowsOf(what string, ours, theirs []round, of func(round) time.Duration) {
	pick := func(rs []round) (out []time.Duration) {
		for _, r := range rs {
			out = append(out, of(r))
		}
		return out
	}
	b.compare(fmt.Sprintf("%d VMs created and started at once, to %s, against `qemu-img create` and `virsh create`", many, what), pick(ours), pick(theirs), 0)
}

// round holds the results of one burst: the time until all of its VMs were running, and the time until all had printed
// their banners.
type round struct{ running, banners time.Duration }

// latest holds two times per VM, by the index of the VM: when it was running, and when its banner was read.
type latest struct{ running, banner []time.Time }

func (l *latest) round(began time.Time) round {
	return round{slices.MaxFunc(l.running, time.Time.Compare).Sub(began), slices.MaxFunc(l.banner, time.Time.Compare).Sub(began)}
}

// crowd creates and starts many VMs at once over REST, each from its own goroutine, waits for their banners, stores the
// times in took and returns the VMs' ids. n is the number of the round, for the VMs' names.
func (c *trivet) crowd(ctx context.Context, rest *lab.REST, image string, n int, took *round) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, burstWithin)
	defer cancel()
	ids := make([]string, many)
	moments := latest{make([]time.Time, many), make([]time.Time, many)}
	began := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	for i := range many {
		group.Go(func() error {
			var vm lab.VM
			if err := rest.Call(ctx, "POST", "/api/v1/vms", vmBody(fmt.Sprintf("burst-%d-%d", n, i), image), &vm); err != nil {
				return err
			}
			ids[i] = vm.ID
			// The API waits for the start only for a limited time, so the VM may not run yet: awaitState waits for it.
			if err := rest.Call(ctx, "POST", "/api/v1/vms/"+vm.ID+"/start", nil, nil); err != nil {
				return err
			}
			if err := c.AwaitState(ctx, vm.ID, vmv1.VmState_VM_STATE_RUNNING); err != nil {
				return err
			}
			moments.running[i] = time.Now()
			var err error
			moments.banner[i], err = onehost.AwaitBanner(ctx, c.Serial(vm.ID), 0)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	*took = moments.round(began)
	return ids, nil
}

// vmBody returns the body of a REST request that creates a VM with one disk, backed by an image.
func vmBody(name, image string) map[string]any {
	return map[string]any{"name": name, "memory_mib": memoryMiB, "disks": []any{
		map[string]any{"id": "root", "source": map[string]any{"type": "image", "image_id": image}, "size_gib": 1},
	}}
}

// remove deletes VMs by force and waits until the agent has removed their directories.
func (c *trivet) remove(ctx context.Context, ids []string) error {
	ctx, cancel := context.WithTimeout(ctx, burstWithin)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	for _, id := range ids {
		group.Go(func() error {
			if _, err := c.Admin.VMs.DeleteVm(ctx, &vmv1.DeleteVmRequest{OrgId: onehost.Org, ProjectId: "default", VmId: id, Force: true}); err != nil {
				return err
			}
			return lab.Until(ctx, "the host keeps nothing of "+id, func(context.Context) error {
				if _, err := os.Stat(c.VMDir(id)); err == nil {
					return errors.New("its directory is there")
				}
				return nil
			})
		})
	}
	return group.Wait()
}

// idle measures the agent's memory and CPU for idleFor while its guests idle, and adds rows with the results. empty is
// the agent's resident memory in MB before it had guests.
func (c *trivet) idle(ctx context.Context, b *bench, guests int, empty float64) error {
	pid := c.Dir.Running(c.Agent.Name)
	if err := sleep(ctx, settle); err != nil {
		return err
	}
	agent, trio, began := cpuOf(pid), cpuOf(c.Members()...), time.Now()
	var resident []float64
	for time.Since(began) < idleFor {
		all, _, err := memory(pid)
		if err != nil {
			return err
		}
		resident = append(resident, all)
		if err := sleep(ctx, time.Second); err != nil {
			return err
		}
	}
	took := time.Since(began).Seconds()
	agentCPU, trioCPU := (cpuOf(pid)-agent)/took*100, (cpuOf(c.Members()...)-trio)/took*100
	_, anonymous, err := memory(pid)
	if err != nil {
		return err
	}
	b.row(figure.Row{
		What: fmt.Sprintf("agent's resident memory with %d idle VMs, highest of 60", guests), Ours: fmt.Sprintf("%.1f MB", slices.Max(resident)),
		Value: slices.Max(resident), AtMost: 60 + 0.3*float64(guests), Unit: "MB",
		Note: fmt.Sprintf("%.1f MB of it not the program's file; %.1f MB at the start with no VM", anonymous, empty),
	})
	b.row(figure.Row{
		What: fmt.Sprintf("agent's CPU with %d idle VMs, over %.0f s", guests, took), Ours: fmt.Sprintf("%.2f %% of a core", agentCPU),
		Note: fmt.Sprintf("the three members together %.2f %%", trioCPU),
	})
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// crowd creates and starts VMs with libvirt that have the same devices as Trivet's.
type crowd struct {
	l                  *libvirt.Daemon
	dir, base, machine string
}

func (p *crowd) round(ctx context.Context, took *round) error {
	bounded, cancel := context.WithTimeout(ctx, burstWithin)
	defer cancel()
	moments := latest{make([]time.Time, many), make([]time.Time, many)}
	domains := make([]libvirt.Domain, many)
	files := make([]string, many)
	for i := range domains {
		name := fmt.Sprintf("trivet-bench-%d", i)
		domains[i] = libvirt.Domain{
			Name: name, UUID: uuid.NewString(), Machine: p.machine, CPUMaximum: true, VCPUs: 1, MemoryMiB: memoryMiB, Base: p.base,
			Disk: filepath.Join(p.dir, name+".qcow2"), Serial: filepath.Join(p.dir, name+".serial"), Ports: 5, TBSizeMiB: 256,
		}
		var err error
		if files[i], err = domains[i].Write(p.dir); err != nil {
			return err
		}
		if err := os.RemoveAll(domains[i].Serial); err != nil {
			return err
		}
	}
	began := time.Now()
	group, bounded := errgroup.WithContext(bounded)
	for i, d := range domains {
		group.Go(func() error {
			out, err := exec.CommandContext(bounded, "qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", d.Base, d.Disk, "1G").CombinedOutput()
			if err != nil {
				return fmt.Errorf("qemu-img create: %w: %s", err, out)
			}
			if err := p.l.Create(bounded, files[i]); err != nil {
				return err
			}
			moments.running[i] = time.Now()
			moments.banner[i], err = onehost.AwaitBanner(bounded, d.Serial, 0)
			return err
		})
	}
	err := group.Wait()
	for i, d := range domains {
		if !moments.running[i].IsZero() {
			err = errors.Join(err, p.l.Destroy(context.WithoutCancel(ctx), d.Name))
		}
	}
	if err != nil {
		return err
	}
	*took = moments.round(began)
	return nil
}

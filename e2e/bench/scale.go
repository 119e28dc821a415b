package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/sync/errgroup"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
	"github.com/trivet-cloud/trivet/e2e/bench/openloop"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

const (
	// hostsPerProcess is the number of simulated hosts that share a process and die together, and scaleVCPUs is the size
	// of each host.
	hostsPerProcess, scaleVCPUs = 50, 64
	// scaleRate is the load in requests per second.
	scaleRate = 100
	// quietFor is how long the members are observed while nobody calls the API.
	quietFor = time.Minute
	// recoveredWithin is the timeout for the recovery of the VMs of the hosts that died.
	recoveredWithin = 5 * time.Minute
)

// scale measures a cloud with many hosts, whose VMs all run: what it costs while nobody calls the API, the latency of the
// API, and the same while many hosts die at once and their VMs are started on other hosts.
func scale(ctx context.Context, b *bench) (err error) {
	c, err := newCloud(ctx, b, "scale")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	images, err := lab.ImportGuest(ctx, c.Trio, c.Admin, b.guest)
	if err != nil {
		return err
	}
	began := time.Now()
	f, err := startFleet(ctx, c, fleetOptions{hosts: b.scaleHosts, perProcess: hostsPerProcess, vcpus: scaleVCPUs})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	report.Say("%d hosts are READY after %.0f s", b.scaleHosts, time.Since(began).Seconds())
	r := &recorded{c: c, fleet: f, image: images.Disk, random: rand.New(rand.NewPCG(1, 2)), rate: scaleRate}
	if err := r.openProjects(ctx, b.vms/projects); err != nil {
		return err
	}
	if err := r.startMany(ctx, b, images.Kernel); err != nil {
		return fmt.Errorf("start VMs: %w", err)
	}
	if err := r.quiet(ctx, b); err != nil {
		return err
	}
	var well openloop.Result
	var used cpuUsed
	if err := r.run(ctx, b.load, &well, &used); err != nil {
		return err
	}
	r.rows(b, fmt.Sprintf("%d hosts", b.scaleHosts), &well, used)
	return r.die(ctx, b)
}

// startMany creates VMs that can be started on any host, because they have no disks, and starts them.
func (r *recorded) startMany(ctx context.Context, b *bench, kernel string) error {
	began, cpu := time.Now(), cpuOf(r.c.Members()...)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(fillers)
	n := b.vms / projects * projects
	for i := range n {
		group.Go(func() error {
			p := r.projects[i%projects]
			vm, err := r.c.Admin.VMs.CreateVm(ctx, &vmv1.CreateVmRequest{
				OrgId: onehost.Org, ProjectId: p.name, Name: r.name(), Metadata: map[string]string{"trivet/ha": "restart"},
				Spec: &vmv1.VmSpec{Memory: &vmv1.MemorySpec{SizeMib: memoryMiB}, Boot: &vmv1.BootSpec{Kernel: kernel}},
			})
			if err != nil {
				return err
			}
			p.vms[i/projects] = vm.GetId()
			if i%4000 == 0 {
				report.Say("%d of %d VMs run", i, n)
			}
			_, err = r.c.Admin.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: onehost.Org, ProjectId: p.name, VmId: vm.GetId()})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	b.row(figure.Row{
		What: fmt.Sprintf("create and start %d VMs, %d callers, %d hosts", n, fillers, b.scaleHosts),
		Ours: fmt.Sprintf("%.0f /s", float64(n)/time.Since(began).Seconds()),
		Note: fmt.Sprintf("CPU of the members per VM %.2f ms", (cpuOf(r.c.Members()...)-cpu)/float64(n)*1000),
	})
	return nil
}

// quiet measures the members while nobody calls the API. The hosts send heartbeats and reports.
func (r *recorded) quiet(ctx context.Context, b *bench) error {
	if err := b.Calm.Await(ctx); err != nil {
		return err
	}
	cpu, hosts, began := cpuOf(r.c.Members()...), cpuOf(r.fleet.pids()...), time.Now()
	select {
	case <-time.After(quietFor):
	case <-ctx.Done():
		return ctx.Err()
	}
	took := time.Since(began).Seconds()
	largest := 0.0
	for _, pid := range r.c.Members() {
		all, _, err := memory(pid)
		if err != nil {
			return err
		}
		largest = max(largest, all)
	}
	b.row(figure.Row{
		What: fmt.Sprintf("%d hosts with %d running VMs, nobody calls the API", b.scaleHosts, b.vms),
		Ours: fmt.Sprintf("members %.0f %% of a core, largest member %.0f MB", (cpuOf(r.c.Members()...)-cpu)/took*100, largest),
		Note: fmt.Sprintf("simulated hosts %.0f %% of a core", (cpuOf(r.fleet.pids()...)-hosts)/took*100),
	})
	return nil
}

// die kills the process of the first hosts, and measures the latency of the API until the VMs of these hosts run
// elsewhere.
func (r *recorded) die(ctx context.Context, b *bench) error {
	dead := map[string]bool{}
	if err := r.c.eachNode(ctx, func(n *vmv1.Node) {
		if n.GetName() < hostName(hostsPerProcess) {
			dead[n.GetId()] = true
		}
	}); err != nil {
		return err
	}
	lost, err := r.runningOn(ctx, dead)
	if err != nil {
		return err
	}
	if err := r.fleet.procs[0].Process.Kill(); err != nil {
		return err
	}
	began := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	var got openloop.Result
	var used cpuUsed
	group.Go(func() error { return r.run(ctx, max(b.load, 90*time.Second), &got, &used) })
	var recovered time.Duration
	group.Go(func() error {
		ctx, cancel := context.WithTimeout(ctx, recoveredWithin)
		defer cancel()
		err := r.awaitMoved(ctx, lost, dead)
		recovered = time.Since(began)
		return err
	})
	if err := group.Wait(); err != nil {
		return err
	}
	r.rows(b, fmt.Sprintf("%d of %d hosts die at once", hostsPerProcess, b.scaleHosts), &got, used)
	b.row(figure.Row{
		What: fmt.Sprintf("%d VMs of %d hosts that died at once run on other hosts", len(lost), hostsPerProcess),
		Ours: fmt.Sprintf("%.0f s", recovered.Seconds()), Value: recovered.Seconds(), AtMost: 90, Unit: "s",
		Note: "45 s of it until a host counts as lost",
	})
	return nil
}

// place is the tenant of a VM and its ID.
type place struct{ project, vm string }

// runningOn returns the running VMs on some hosts.
func (r *recorded) runningOn(ctx context.Context, hosts map[string]bool) (vms []place, err error) {
	for _, p := range r.projects {
		for token := ""; ; {
			page, err := r.c.Admin.VMs.ListVms(ctx, &vmv1.ListVmsRequest{
				OrgId: onehost.Org, ProjectId: p.name, PageSize: 1000, PageToken: token, Filter: "state = RUNNING",
			})
			if err != nil {
				return nil, err
			}
			for _, vm := range page.GetVms() {
				if hosts[vm.GetNodeId()] {
					vms = append(vms, place{p.name, vm.GetId()})
				}
			}
			if token = page.GetNextPageToken(); token == "" {
				break
			}
		}
	}
	return vms, nil
}

// awaitMoved waits until each of the VMs runs on a host that is not in dead.
func (r *recorded) awaitMoved(ctx context.Context, vms []place, dead map[string]bool) error {
	return lab.Until(ctx, "all VMs run on other hosts", func(ctx context.Context) error {
		for len(vms) > 0 {
			one := vms[0]
			vm, err := r.c.Admin.VMs.GetVm(ctx, &vmv1.GetVmRequest{OrgId: onehost.Org, ProjectId: one.project, VmId: one.vm})
			if err != nil {
				return err
			}
			if vm.GetState() != vmv1.VmState_VM_STATE_RUNNING || dead[vm.GetNodeId()] {
				return fmt.Errorf("%d VMs are left, and the first is %s", len(vms), vm.GetState())
			}
			vms = vms[1:]
		}
		return nil
	})
}

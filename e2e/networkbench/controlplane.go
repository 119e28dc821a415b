package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sync/errgroup"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/kvbench/load"
	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

const (
	// org and project own everything that the part creates.
	org, project = "default", "default"
	// smallVPC is the number of ports of the VPCs small and few. fewHosts is the number of hosts that have the VPC few.
	smallVPC, fewHosts = 100, 5
	// callers is the number of concurrent callers that fill the large VPC.
	callers = 32
	// readyWithin is the timeout of steps such as the start of the members.
	readyWithin = time.Minute
	// callWithin is the timeout of a call.
	callWithin = 20 * time.Second
)

// cluster is a control plane of three members with simulated hosts.
type cluster struct {
	*bench
	dir   lab.Dir
	trio  *lab.Trio
	conns []*lab.GRPC // one for each member, as the administrator
	hosts *child
	// large and small are VPCs on all hosts. few is a VPC on fewHosts hosts.
	large, small, few subnet
}

// subnet is the only subnet of a VPC.
type subnet struct{ vpc, id string }

// measureControlPlane measures the creation of ports, and the messages that it causes to hosts.
func measureControlPlane(ctx context.Context, b *bench) (err error) {
	c := &cluster{bench: b, dir: lab.Dir(b.dir)}
	defer func() { err = errors.Join(err, c.close()) }()
	if err := c.start(ctx); err != nil {
		return fmt.Errorf("start: %w", err)
	}
	if err := c.prepare(ctx); err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	report.Say("%d hosts have the VPCs", b.size.hosts)
	if err := c.fill(ctx, c.few, smallVPC, "few"); err != nil {
		return err
	}
	if err := c.fill(ctx, c.small, smallVPC, "small"); err != nil {
		return err
	}
	if err := c.countMessages(ctx); err != nil {
		return fmt.Errorf("count messages: %w", err)
	}
	return c.measureCreates(ctx)
}

// start starts the members and the simulated hosts.
func (c *cluster) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*readyWithin)
	defer cancel()
	c.trio = lab.NewTrio(c.dir, lab.In(c.bin))
	c.trio.Extra = lab.Unlimited
	if err := c.trio.Prepare(); err != nil {
		return err
	}
	if err := c.trio.StartAll(); err != nil {
		return err
	}
	if err := c.trio.Ready(ctx); err != nil {
		return err
	}
	var token string
	if err := lab.Until(ctx, "there is an administrator", func(context.Context) (err error) {
		token, err = c.trio.AdminToken()
		return err
	}); err != nil {
		return err
	}
	start := hostsStart{Dir: c.dir.Path("hosts")}
	for id := 1; id <= len(c.trio.Members); id++ {
		conn, err := lab.Dial(c.trio.Members[id], token)
		if err != nil {
			return err
		}
		c.conns = append(c.conns, conn)
		start.Members = append(start.Members, c.trio.Members[id]+":7443")
	}
	if err := os.Mkdir(start.Dir, 0o700); err != nil {
		return err
	}
	for range c.size.hosts {
		token, err := c.conns[0].NodeToken(ctx)
		if err != nil {
			return err
		}
		start.Tokens = append(start.Tokens, token)
	}
	var err error
	if c.hosts, err = startChild("", hostsCommand); err != nil {
		return err
	}
	var state hostsState
	if err := c.hosts.tell(start); err != nil {
		return err
	}
	if err := c.hosts.ask(ctx, "", &state); err != nil {
		return err
	}
	for i := range c.size.hosts {
		if _, err := c.conns[0].AwaitNode(ctx, fmt.Sprintf("sim-%02d", i)); err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) close() error {
	var errs []error
	if c.hosts != nil {
		errs = append(errs, c.hosts.close())
	}
	for _, conn := range c.conns {
		errs = append(errs, conn.Close())
	}
	if c.trio != nil {
		errs = append(errs, c.trio.StopAll())
	}
	return errors.Join(errs...)
}

// prepare creates the VPCs, and on each host a VM with NICs in them.
func (c *cluster) prepare(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*readyWithin)
	defer cancel()
	limit := uint64(3 * c.size.vpcPorts)
	for _, p := range []string{"", project} {
		request := &identityv1.SetQuotaRequest{OrgId: org, ProjectId: p, Quota: &identityv1.Quota{Ports: &limit}}
		if _, err := c.conns[0].Identity.SetQuota(ctx, request); err != nil {
			return fmt.Errorf("permit %d ports: %w", limit, err)
		}
	}
	networks := c.conns[0].Networks()
	for name, out := range map[string]*subnet{"large": &c.large, "small": &c.small, "few": &c.few} {
		v, err := networks.CreateVpc(ctx, &networkv1.CreateVpcRequest{
			OrgId: org, ProjectId: project, Name: name, CidrBlock: "10.0.0.0/16",
		})
		if err != nil {
			return err
		}
		s, err := networks.CreateSubnet(ctx, &networkv1.CreateSubnetRequest{
			OrgId: org, ProjectId: project, Name: name, VpcId: v.GetId(), CidrBlock: "10.0.0.0/16",
		})
		if err != nil {
			return err
		}
		*out = subnet{v.GetId(), s.GetId()}
	}
	images, err := lab.ImportGuest(ctx, c.trio, c.conns[0], c.guest)
	if err != nil {
		return err
	}
	for i := range c.size.hosts {
		if err := c.createVM(ctx, images, "all", i, c.large, c.small); err != nil {
			return err
		}
	}
	for i := range fewHosts {
		if err := c.createVM(ctx, images, "few", i, c.few); err != nil {
			return err
		}
	}
	for s, hosts := range map[subnet]int{c.large: c.size.hosts, c.small: c.size.hosts, c.few: fewHosts} {
		if err := c.awaitPorts(ctx, s, hosts, hosts); err != nil {
			return err
		}
	}
	return nil
}

// createVM creates a VM of an anti-affinity group: no two VMs of the group are on one host.
func (c *cluster) createVM(
	ctx context.Context, images lab.GuestImages, group string, number int, nics ...subnet,
) error {
	spec := &vmv1.VmSpec{
		Cpu: &vmv1.CpuSpec{Vcpus: 1}, Memory: &vmv1.MemorySpec{SizeMib: 192},
		Boot: &vmv1.BootSpec{Kernel: images.Kernel, Initrd: images.Initrd, Cmdline: "console=ttyS0"},
	}
	for i, s := range nics {
		spec.Network = append(spec.Network, &vmv1.NetworkSpec{Id: fmt.Sprintf("nic%d", i), SubnetId: s.id})
	}
	_, err := c.conns[0].VMs.CreateVm(ctx, &vmv1.CreateVmRequest{
		Name: fmt.Sprintf("%s-%d", group, number), OrgId: org, ProjectId: project, Spec: spec,
		Labels: map[string]string{"trivet/anti-affinity": group},
	})
	return err
}

// awaitPorts waits until a number of hosts have the VPC, and each of them has at least a number of its ports.
func (c *cluster) awaitPorts(ctx context.Context, s subnet, hosts, ports int) error {
	return lab.Until(ctx, "the hosts have the ports", func(ctx context.Context) error {
		var state hostsState
		if err := c.hosts.ask(ctx, s.vpc, &state); err != nil {
			return err
		}
		if state.Hosts != hosts || state.Fewest < ports {
			return fmt.Errorf("%d hosts have the VPC, with at least %d ports", state.Hosts, state.Fewest)
		}
		return nil
	})
}

// create creates a port through one of the members, and returns its ID.
func (c *cluster) create(ctx context.Context, s subnet, number int) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	networks := c.conns[number%len(c.conns)].Networks()
	p, err := networks.CreatePort(ctx, &networkv1.CreatePortRequest{OrgId: org, ProjectId: project, SubnetId: s.id})
	return p.GetId(), err
}

// fill creates ports until the VPC has count ports that belong to no VM, and waits until the hosts have them.
func (c *cluster) fill(ctx context.Context, s subnet, count int, name string) error {
	all, err := load.Closed(ctx, callers, count, func(ctx context.Context, _, i int) error {
		_, err := c.create(ctx, s, i)
		return err
	})
	if n, first := all.Failed(); n > 0 {
		err = errors.Join(err, fmt.Errorf("%d of %d creates failed: %w", n, count, first))
	}
	if err != nil {
		return fmt.Errorf("fill VPC %s: %w", name, err)
	}
	hosts := c.size.hosts
	if s == c.few {
		hosts = fewHosts
	}
	limited, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	return c.awaitPorts(limited, s, hosts, count+hosts)
}

func (c *cluster) pids() (pids []int) {
	for id := range c.trio.Members {
		pids = append(pids, c.dir.Running(c.trio.Name(id)))
	}
	return pids
}

// fillLarge fills the large VPC, and measures the rate, and the CPU time and memory that the members use.
func (c *cluster) fillLarge(ctx context.Context) error {
	memory, err := usage.MemoryOf(c.pids()...)
	if err != nil {
		return err
	}
	before, err := usage.Of(c.pids()...)
	if err != nil {
		return err
	}
	began := time.Now()
	if err := c.fill(ctx, c.large, c.size.vpcPorts, "large"); err != nil {
		return err
	}
	took := time.Since(began)
	after, err := usage.Of(c.pids()...)
	if err != nil {
		return err
	}
	filled, err := usage.MemoryOf(c.pids()...)
	if err != nil {
		return err
	}
	c.results.Ours("fill", float64(c.size.vpcPorts)/took.Seconds())
	c.results.Note("fill", "until all hosts have the last one")
	c.results.Ours("cpu", milliseconds(after.Since(before).CPU)/float64(c.size.vpcPorts))
	c.results.Ours("memory", float64(filled.Resident)/1e6)
	c.results.Peer("memory", float64(memory.Resident)/1e6)
	c.results.Ours("anonymous", float64(filled.Anonymous)/1e6)
	c.results.Peer("anonymous", float64(memory.Anonymous)/1e6)
	report.Say("%d ports after %s", c.size.vpcPorts, took)
	return nil
}

// measureCreates measures the latency of creates at a fixed rate, in the large and in the small VPC in turn. It deletes
// the ports of each round after it.
func (c *cluster) measureCreates(ctx context.Context) error {
	turn := func(s subnet, isPeer bool) error {
		created := make(chan string, c.size.rate*int(c.size.rated.Seconds()+60))
		open := load.StartOpen(ctx, float64(c.size.rate), func(ctx context.Context, i int) error {
			id, err := c.create(ctx, s, i)
			if err == nil {
				created <- id
			}
			return err
		})
		select {
		case <-time.After(c.size.rated):
		case <-ctx.Done():
		}
		all, err := open.Stop()
		close(created)
		if n, first := all.Failed(); n > 0 {
			err = errors.Join(err, fmt.Errorf("%d of %d creates failed: %w", n, len(all), first))
		}
		if err != nil {
			return err
		}
		p50, p99 := figure.Median(all.Latencies()), figure.Quantile(all.Latencies(), 0.99)
		c.results.Add("create p50", isPeer, milliseconds(p50))
		c.results.Add("create p99", isPeer, milliseconds(p99))
		report.Say("create, small %v: %d, p50 %s, p99 %s", isPeer, len(all), p50, p99)
		return c.remove(ctx, created)
	}
	return c.InTurn(ctx, c.rounds,
		func(int) error { return turn(c.large, false) },
		func(int) error { return turn(c.small, true) },
	)
}

// remove deletes ports.
func (c *cluster) remove(ctx context.Context, ids <-chan string) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(callers)
	for id := range ids {
		g.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, callWithin)
			defer cancel()
			networks := c.conns[0].Networks()
			_, err := networks.DeletePort(ctx, &networkv1.DeletePortRequest{OrgId: org, ProjectId: project, Id: id})
			return err
		})
	}
	return g.Wait()
}

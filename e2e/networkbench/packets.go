package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Numbers of the ports between which packets are sent: near and local are on the first host, far is on the second.
const near, local, far = firstPort, firstPort + 1, firstPort + 2

// endpoints are the namespaces of ports.
type endpoints struct{ near, local, far string }

// testbed holds the networks through which packets and streams are sent: VPCs that the agent's packages have made, and
// networks that are made by hand.
type testbed struct {
	site *site
	// few and many are in VPCs whose rules refer to a remote group, with 10 members and with many. shared and own are
	// in VPCs with many other ports on the host, which share 10 groups (shared) or have one group each (own).
	few, many, shared, own endpoints
	bridge, vxlan          endpoints // made by hand
}

func newTestbed(ctx context.Context, b *bench) (t *testbed, err error) {
	t = &testbed{}
	if t.site, err = newSite(ctx, "h"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.site.close())
		}
	}()
	for i, c := range []struct {
		name    string
		members int
		ports   int
		groups  int
		out     *endpoints
	}{
		{"few", 10, 0, 0, &t.few}, {"many", b.size.members, 0, 0, &t.many},
		{"shared", 10, b.size.ports, 10, &t.shared}, {"own", 10, b.size.ports, b.size.ports, &t.own},
	} {
		if *c.out, err = t.makeVPC(ctx, c.name, uint32(100+i), c.members, c.ports, c.groups); err != nil {
			return t, fmt.Errorf("VPC %s: %w", c.name, err)
		}
	}
	bridge, err := newPlainBridge(ctx, "plain")
	if err != nil {
		return t, err
	}
	vxlan, err := newPlainVXLAN(ctx, "vx", near, far)
	if err != nil {
		return t, err
	}
	for _, a := range []struct {
		bridge *plainBridge
		number int
		out    *string
	}{
		{bridge, near, &t.bridge.near}, {bridge, local, &t.bridge.local},
		{vxlan.hosts[0], near, &t.vxlan.near}, {vxlan.hosts[1], far, &t.vxlan.far},
	} {
		if *a.out, err = a.bridge.attach(ctx, a.number); err != nil {
			return t, err
		}
	}
	return t, nil
}

// makeVPC makes a VPC on both hosts, whose ports near, local and far permit everything from the members of a remote
// group. On the first host the VPC has further ports, without devices. If the remote group has 10 members, none of the
// further ports is a member.
func (t *testbed) makeVPC(
	ctx context.Context, name string, vni uint32, members, ports, groups int,
) (e endpoints, err error) {
	vpc := newVPC(name, vni)
	vpc.Groups = []cloud.HostGroup{groupOf("measured", 9, "members")}
	vpc.Members = []cloud.GroupMembers{membersOf("members", near, members)}
	one, two := vpc, vpc
	one.Subnets, two.Subnets = []cloud.HostSubnet{vpc.Subnets[0]}, []cloud.HostSubnet{vpc.Subnets[0]}
	addPorts(&one, firstPort+100, ports, groups)
	one.Subnets[0].Ports = append(one.Subnets[0].Ports, portOf(near, "measured"), portOf(local, "measured"))
	one.Subnets[0].Remotes = []cloud.RemotePort{remoteOf(far, t.site.hosts[1].vtep)}
	two.Subnets[0].Ports = []cloud.HostPort{portOf(far, "measured")}
	first := t.site.hosts[0].vtep
	two.Subnets[0].Remotes = []cloud.RemotePort{remoteOf(near, first), remoteOf(local, first)}
	for i, v := range []cloud.HostVPC{one, two} {
		if err := t.site.hosts[i].apply(ctx, v); err != nil {
			return e, err
		}
	}
	for _, a := range []struct {
		host, number int
		vpc          cloud.HostVPC
		out          *string
	}{{0, near, one, &e.near}, {0, local, one, &e.local}, {1, far, two, &e.far}} {
		if *a.out, err = t.site.hosts[a.host].attach(ctx, a.vpc, a.number); err != nil {
			return e, err
		}
	}
	return e, nil
}

// flow is a UDP flow of 64-byte frames between two namespaces.
type flow struct {
	from, to int // sockets
	target   unix.SockaddrInet4
	answered bool // whether the receiver answers before each batch, so that the connection is established
}

// payload is the length of the UDP payload of a frame of 64 bytes.
const payload = 64 - 14 - 20 - 8

// newFlow opens sockets in the namespaces from and to, and sends a packet, which must arrive.
func newFlow(from, to string, target netip.Addr, answered bool) (*flow, error) {
	f := &flow{from: -1, to: -1, answered: answered, target: unix.SockaddrInet4{Port: 7, Addr: target.As4()}}
	if !answered {
		f.target.Port = 9 // another port than that of answered flows, so that the flow is not established already
	}
	for _, s := range []struct {
		name string
		out  *int
		bind unix.SockaddrInet4
	}{{from, &f.from, unix.SockaddrInet4{Port: 7000}}, {to, &f.to, f.target}} {
		if err := nsthread.InNamed(s.name, func() (err error) {
			if *s.out, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
				return err
			}
			limit := unix.NsecToTimeval(time.Second.Nanoseconds())
			err = unix.SetsockoptTimeval(*s.out, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit)
			return errors.Join(err, unix.Bind(*s.out, &s.bind))
		}); err != nil {
			f.close()
			return nil, err
		}
	}
	if err := f.check(); err != nil {
		f.close()
		return nil, fmt.Errorf("%s to %s: %w", from, to, err)
	}
	return f, nil
}

func (f *flow) close() {
	for _, s := range []int{f.from, f.to} {
		if s >= 0 {
			_ = unix.Close(s)
		}
	}
}

// check sends a packet and receives it. In an answered flow, the receiver sends one back.
func (f *flow) check() error {
	buffer := make([]byte, 1500)
	var last error
	for range 10 { // the first packets may need the neighbour's address
		if err := unix.Sendto(f.from, make([]byte, payload), 0, &f.target); err != nil {
			return err
		}
		_, sender, err := unix.Recvfrom(f.to, buffer, 0)
		if err != nil {
			last = err
			continue
		}
		if !f.answered {
			return nil
		}
		if err := unix.Sendto(f.to, make([]byte, payload), 0, sender); err != nil {
			return err
		}
		_, _, err = unix.Recvfrom(f.from, buffer, 0)
		return err
	}
	return fmt.Errorf("no packet arrives: %w", last)
}

// batch sends count packets, receives each of them, and returns the CPU time per packet in nanoseconds. One thread
// sends and receives, and the kernel delivers a packet through veth pairs, bridges and VXLAN in the softirq that runs
// on this thread, so its CPU time contains the whole path and both system calls.
func (f *flow) batch(count int) (float64, error) {
	if err := f.drain(); err != nil {
		return 0, err
	}
	if err := f.check(); err != nil {
		return 0, err
	}
	message, buffer := make([]byte, payload), make([]byte, 1500)
	var used time.Duration
	lost := 0
	err := nsthread.Do(func() error {
		before, err := threadCPU()
		if err != nil {
			return err
		}
		for range count {
			if err := unix.Sendto(f.from, message, 0, &f.target); err != nil {
				return err
			}
			if _, _, err := unix.Recvfrom(f.to, buffer, unix.MSG_DONTWAIT); errors.Is(err, unix.EAGAIN) {
				lost++
			} else if err != nil {
				return err
			}
		}
		after, err := threadCPU()
		used = after - before
		return err
	})
	if err != nil {
		return 0, err
	}
	// The softirq of a packet can be left to another thread of the kernel.
	if lost > count/100 {
		return 0, fmt.Errorf("%d of %d packets had not arrived when they were sent", lost, count)
	}
	return float64(used.Nanoseconds()) / float64(count), nil
}

// drain empties the receiver's buffer.
func (f *flow) drain() error {
	for buffer := make([]byte, 1500); ; {
		_, _, err := unix.Recvfrom(f.to, buffer, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// threadCPU returns the CPU time that the calling thread has used.
func threadCPU() (time.Duration, error) {
	var t unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t)
	return time.Duration(t.Nano()), err
}

// measurePackets measures the CPU time per packet of flows.
func measurePackets(ctx context.Context, b *bench) (err error) {
	t, err := newTestbed(ctx, b)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.site.close()) }()
	localAddress, farAddress := addressOf(local), addressOf(far)
	for _, c := range []struct {
		id                 string
		ours, peer         endpoints
		across, unanswered bool
	}{
		{"established", t.many, t.bridge, false, false},
		{"vxlan", t.many, t.vxlan, true, false},
		{"first group", t.many, t.few, false, true},
		{"first ports", t.shared, t.few, false, true},
		{"first own", t.own, t.few, false, true},
	} {
		open := func(e endpoints) (*flow, error) {
			if c.across {
				return newFlow(e.near, e.far, farAddress, !c.unanswered)
			}
			return newFlow(e.near, e.local, localAddress, !c.unanswered)
		}
		ours, peer := func() (*flow, error) { return open(c.ours) }, func() (*flow, error) { return open(c.peer) }
		count := b.size.batch
		if c.id == "first own" {
			count /= 5 // these packets take longest
		}
		if err := comparePackets(ctx, b, c.id, count, ours, peer); err != nil {
			return fmt.Errorf("%s: %w", c.id, err)
		}
		f := b.results.Of(c.id)
		report.Say("%s: %.0f ns, peer %.0f ns", c.id, figure.Median(f.Ours), figure.Median(f.Peer))
	}
	return nil
}

// comparePackets sends batches of count packets over two flows in turn. The figure of a round is the fastest batch: the
// times of other batches include interrupts, and cache misses that other programs cause.
func comparePackets(ctx context.Context, b *bench, id string, count int, open ...func() (*flow, error)) error {
	var flows []*flow
	for _, o := range open {
		f, err := o()
		if err != nil {
			return err
		}
		defer f.close()
		flows = append(flows, f)
	}
	return b.InTurn(ctx, b.rounds, func(int) error {
		best := make([]float64, len(flows))
		for range b.size.batches {
			for i, f := range flows {
				took, err := f.batch(count)
				if err != nil {
					return err
				}
				if best[i] == 0 || took < best[i] {
					best[i] = took
				}
			}
		}
		b.results.Ours(id, best[0])
		b.results.Peer(id, best[1])
		return nil
	})
}

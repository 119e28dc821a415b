package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"strconv"
	"time"

	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/usage"
	"github.com/trivet-cloud/trivet/nodeagent/firewall"
	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/nodeagent/vpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// agentCommand is the first argument with which this program runs the agent's networks (nodeagent/vpc) with one VPC.
// The process has no VMs and no connection to the control plane, and keeps the taps of all ports open.
const agentCommand = "agent"

// agentState is the answer of the process to each line that it reads.
type agentState struct {
	// Started is the time from the snapshot until all taps were up.
	Started time.Duration
	// Applied counts the applications of the VPC, and Writes the changes of the kernel's state.
	Applied, Writes uint64
}

// agentVPC is the ID of the VPC. It is a UUID, because the agent removes only namespaces with a UUID in their names.
const agentVPC = cloud.VPCID("00000000-0000-4000-8000-000000000001")

func agentMain(args []string) error {
	flags := flag.NewFlagSet(agentCommand, flag.ContinueOnError)
	ports := flags.Int("ports", 0, "")
	name := flags.String("prefix", "", "")
	if err := flags.Parse(args); err != nil {
		return err
	}
	vtep := netip.MustParseAddr("192.0.2.1")
	device, err := netdev.New(netdev.Options{VTEP: vtep, Device: "eth0", Prefix: *name})
	if err != nil {
		return err
	}
	defer device.Close()
	filter, err := firewall.New(firewall.Options{Trusted: []string{"vx*"}})
	if err != nil {
		return err
	}
	networks, err := vpc.New(vpc.Options{
		VTEP: vtep, Host: device, Firewall: filter, Upstreams: func() []netip.AddrPort { return nil },
		Acknowledge: func(cloud.NetworkAck) {}, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	defer networks.Close()
	update := agentUpdate(*ports)
	ctx, cancel := context.WithTimeout(context.Background(), partWithin)
	defer cancel()
	began := time.Now()
	networks.Apply(update)
	for i := range update.Ports {
		tap, err := networks.OpenTap(ctx, update.Ports[i].ID)
		if err != nil {
			return err
		}
		defer tap.Close()
	}
	state := agentState{Started: time.Since(began)}
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var question any
		if err := in.Decode(&question); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		counts := networks.Counts()
		state.Applied, state.Writes = counts.Applied, counts.Writes
		if err := out.Encode(state); err != nil {
			return err
		}
	}
}

// agentUpdate returns a snapshot with one VPC, whose ports are on the host and share 10 groups of 10 rules.
func agentUpdate(ports int) cloud.NetworkUpdate {
	const node = cloud.NodeID("host-1")
	all := netip.MustParsePrefix("10.0.0.0/16")
	u := cloud.NetworkUpdate{
		Node: node, Stream: 1, Revision: 1, Snapshot: true,
		VPCs: []cloud.VPCOnHost{{
			VPC: cloud.VPC{ID: agentVPC, Project: "web", CIDR: all, MTU: 1450}, Domain: "web.internal",
		}},
		Subnets: []cloud.Subnet{{
			ID: "subnet", VPC: agentVPC, Project: "web", CIDR: all, Gateway: addressOf(1), DHCP: true, VNI: 100,
		}},
	}
	for i := range 10 {
		g := groupOf(cloud.SecurityGroupID(fmt.Sprintf("group-%d", i)), 9, "")
		u.Groups = append(u.Groups, cloud.SecurityGroup{ID: g.ID, Project: "web", Rules: g.Rules})
	}
	for i := range ports {
		p := portOf(firstPort + i)
		u.Ports = append(u.Ports, cloud.PortOnHost{
			Port: cloud.Port{
				ID: p.ID, VPC: agentVPC, Project: "web", Subnet: "subnet", MAC: p.MAC, IP: p.IP, Secured: true, Node: node,
				Groups: []cloud.SecurityGroupID{u.Groups[i%10].ID},
			},
			HostName: fmt.Sprintf("vm-%d", i), BindingGeneration: 1,
		})
	}
	return u
}

// measureAgent measures memory and CPU time of the agent's networks, with many ports and with 10 ports.
func measureAgent(ctx context.Context, b *bench) error {
	if err := b.Calm.Await(ctx); err != nil {
		return err
	}
	if err := watchAgent(ctx, b, b.size.agentPorts, false, b.size.watched); err != nil {
		return err
	}
	b.results.Note("agent memory", "without the rest of the agent: VMs, the connection to the control plane")
	return watchAgent(ctx, b, 10, true, b.size.watched/2)
}

// idleFor is how long the CPU time of an agent is counted between resyncs.
const idleFor = 15 * time.Second

// watchAgent starts an agent with a number of ports, and watches it for the duration watched after a first resync.
func watchAgent(ctx context.Context, b *bench, ports int, isPeer bool, watched time.Duration) (err error) {
	s, err := newSite(ctx, "agent")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	c, err := startChild(s.hosts[0].name, agentCommand, "-ports", strconv.Itoa(ports), "-prefix", prefix+"agent-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	var first, state agentState
	if err := c.ask(ctx, "state", &first); err != nil {
		return err
	}
	b.results.Add("agent start", isPeer, first.Started.Seconds())
	report.Say("agent: %d ports after %s", ports, first.Started)
	w := &agentWatch{child: c}
	if err := w.untilResync(ctx); err != nil {
		return err
	}
	begin := w.sample
	if err := w.forDuration(ctx, idleFor); err != nil {
		return err
	}
	idle := 100 * w.sample.Since(begin).CPU.Seconds() / idleFor.Seconds()
	b.results.Add("agent idle", isPeer, idle)
	begin = w.sample
	resyncs := 0
	for began := time.Now(); time.Since(began) < watched; resyncs++ {
		if err := w.untilResync(ctx); err != nil {
			return err
		}
	}
	resync := milliseconds(w.sample.Since(begin).CPU) / float64(resyncs)
	b.results.Add("agent resync", isPeer, resync)
	b.results.Add("agent memory", isPeer, float64(w.memory.Resident)/1e6)
	b.results.Add("agent anonymous", isPeer, float64(w.memory.Anonymous)/1e6)
	if err := c.ask(ctx, "state", &state); err != nil {
		return err
	}
	report.Say("agent: %d ports: %.1f MB, %.3f %% of a core idle, %.1f ms of CPU for a resync",
		ports, float64(w.memory.Resident)/1e6, idle, resync)
	if state.Writes != first.Writes {
		return fmt.Errorf("resyncs without a change made %d writes", state.Writes-first.Writes)
	}
	return nil
}

// agentWatch observes the process of an agent.
type agentWatch struct {
	child  *child
	sample usage.Sample // the last sample
	memory usage.Memory // the highest values of all samples
}

// untilResync waits until the VPC was applied again, and takes a sample then.
func (w *agentWatch) untilResync(ctx context.Context) error {
	var first, now agentState
	if err := w.child.ask(ctx, "state", &first); err != nil {
		return err
	}
	for now = first; now.Applied == first.Applied; {
		if err := w.forDuration(ctx, time.Second); err != nil {
			return err
		}
		if err := w.child.ask(ctx, "state", &now); err != nil {
			return err
		}
	}
	return nil
}

// forDuration takes samples of the memory for some time, and a sample of the CPU time at its end.
func (w *agentWatch) forDuration(ctx context.Context, d time.Duration) (err error) {
	for began := time.Now(); time.Since(began) < d; {
		m, err := usage.MemoryOf(w.child.cmd.Process.Pid)
		if err != nil {
			return err
		}
		w.memory.Resident, w.memory.Anonymous = max(w.memory.Resident, m.Resident), max(w.memory.Anonymous, m.Anonymous)
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	w.sample, err = usage.Tree(w.child.cmd.Process.Pid)
	return err
}

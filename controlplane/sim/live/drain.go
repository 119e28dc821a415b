package live

import (
	"context"
	"fmt"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// drainHosts drains random hosts one after the other, and uncordons each after a random time, until fleet.closing
// returns true.
func (f *fleet) drainHosts(ctx context.Context) {
	operator := &tenantClient{f: f, name: "operator", rng: f.source(300)}
	for !f.closing() {
		time.Sleep(time.Duration(operator.rng.IntN(20)) * time.Second)
		h := f.hosts[operator.rng.IntN(len(f.hosts))]
		id := f.nodeOf(h)
		if id == "" || f.closing() {
			continue
		}
		force, seconds := operator.rng.IntN(2) == 0, uint32(5+operator.rng.IntN(60))
		operator.ask(ctx, "drain "+string(h.name), func(ctx context.Context, p *process, _ [32]byte) error {
			_, err := p.nodes.Drain(ctx, id, force, seconds)
			return err
		})
		for end := time.Now().Add(time.Duration(operator.rng.IntN(60)) * time.Second); time.Now().Before(end) && !f.closing(); {
			time.Sleep(time.Second)
		}
		operator.ask(ctx, "uncordon "+string(h.name), func(ctx context.Context, p *process, _ [32]byte) error {
			_, err := p.nodes.Cordon(ctx, id, false)
			return err
		})
	}
}

// nodeOf returns the ID of a host, or "" if the host has not joined yet.
func (f *fleet) nodeOf(h *host) cloud.NodeID {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, one := range f.byNode {
		if one == h {
			return id
		}
	}
	return ""
}

// countDrain counts the changes of a host's drain.
func (a *witness) countDrain(before, now *cloud.Node) {
	was, is := phaseOf(before), phaseOf(now)
	switch {
	case was == is:
	case is == cloud.DrainMoving:
		a.f.count("drains")
	case is == cloud.DrainEmpty:
		a.f.count("hosts in maintenance")
	case was == cloud.DrainMoving:
		a.f.count("drains that ended early")
	}
	if was != is {
		a.f.trace.Add("the drain of %s goes from %s to %s", now.Name, was, is)
	}
}

func phaseOf(n *cloud.Node) cloud.DrainPhase {
	if n == nil || n.Drain == nil {
		return 0
	}
	return n.Drain.Phase
}

// checkMaintenance checks that no VM runs, starts or is to run on a host in maintenance, and that no VM has a process
// there.
func (a *witness) checkMaintenance() error {
	for id, vm := range a.vms {
		for _, on := range vm.Hosts() {
			n := a.nodes[on]
			if n == nil || !n.InMaintenance() {
				continue
			}
			switch vm.State {
			case cloud.Starting, cloud.Running, cloud.Migrating: // a call can change a VM from ERROR to STOPPING
				return fmt.Errorf("VM %s is %s on %s, which is in maintenance", id, vm.State, n.Name)
			}
			if vm.Desired.On || vm.Desired.StartAfterStop {
				return fmt.Errorf("VM %s is to run on %s, which is in maintenance", id, n.Name)
			}
			if h := a.f.hostOf(on); h != nil {
				if start, pid, ok := h.runs(id); ok && start <= vm.Desired.Starts {
					return fmt.Errorf("VM %s has pid %d of start %d on %s, which is in maintenance", id, pid, start, n.Name)
				}
			}
		}
	}
	return nil
}

package schedule

import (
	"cmp"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Loss describes the consequences of the loss of one host.
type Loss struct {
	Node cloud.NodeID
	Name string
	// VMs is the number of VMs on the host. Recovered is the number of those that get another host, and Waiting is the
	// number of those for which no host is found. The others stay on the lost host: they must not or cannot run elsewhere.
	VMs, Recovered, Waiting int
	// First is the name of the first VM for which no host is found, and Reason is the reason.
	First, Reason string
}

// FindLosses computes for each host the consequences of its loss: whether the other hosts have room for all of its VMs
// that the control plane then starts elsewhere. The VMs are placed by the rules of Place, in the order of their
// priority. The result has no entries for hosts that are NOT_READY, because these count as lost already. It is sorted
// by host name.
func FindLosses(s *Snapshot) []Loss {
	t := newTrial(s)
	byHost := map[cloud.NodeID][]*SnapshotVM{}
	for i := range s.VMs {
		byHost[s.VMs[i].Node] = append(byHost[s.VMs[i].Node], &s.VMs[i])
	}
	var out []Loss
	for i := range s.Hosts {
		h := &s.Hosts[i]
		if h.Node.State(s.Now, h.LastSeen) != cloud.NodeNotReady {
			out = append(out, t.lose(h, byHost[h.Node.ID]))
		}
	}
	slices.SortFunc(out, func(a, b Loss) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Node, b.Node)) })
	return out
}

// lose removes the host from the trial, places its VMs on other hosts, and then restores the trial.
func (t *trial) lose(h *SnapshotHost, vms []*SnapshotVM) Loss {
	out := Loss{Node: h.Node.ID, Name: h.Node.Name, VMs: len(vms)}
	vms = slices.DeleteFunc(slices.Clone(vms), func(vm *SnapshotVM) bool { return !vm.Recovers })
	sortVMs(vms)
	slices.SortStableFunc(vms, func(a, b *SnapshotVM) int { return cmp.Compare(b.Priority, a.Priority) })
	for _, vm := range vms {
		t.take(vm, h.Node.ID)
	}
	if !mutant.On(mutant.CountLostHost) {
		t.index.Remove(h.Node.ID)
	}
	moved := make([]cloud.NodeID, len(vms))
	for i, vm := range vms {
		chosen := t.place(vm, nil)
		if moved[i] = chosen.Node; chosen.Node != "" {
			t.add(vm, chosen.Node)
			out.Recovered++
			continue
		}
		if out.Waiting++; out.Waiting == 1 {
			out.First = vm.Name
			if out.Reason, _ = Summarize(chosen.Refused); out.Reason == "" {
				out.Reason = "there is no other host"
			}
		}
	}
	for i, vm := range vms {
		if moved[i] != "" {
			t.take(vm, moved[i])
		}
		t.join(vm, h.Node.ID, 1)
	}
	t.index.Put(&h.Node, h.LastSeen)
	return out
}

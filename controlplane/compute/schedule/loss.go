package schedule

import (
	"cmp"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Loss describes what happens if one host is lost.
type Loss struct {
	Node cloud.NodeID
	Name string
	// VMs is the number of VMs on the host. Of these, Recovered get another host, Waiting find none, and the others stay
	// on the lost host: they must not or cannot run elsewhere.
	VMs, Recovered, Waiting int
	// First is the name of the first VM that finds no host, and Reason is why.
	First, Reason string
}

// FindLosses computes for each host what happens if this host is lost: whether the other hosts have room for all of its
// VMs that the control plane then starts elsewhere. The VMs are placed by the rules of Place, in the order of their
// priority. Hosts that are NOT_READY are not considered, because their loss is already being dealt with. The result is
// sorted by the names of the hosts.
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

// lose removes the host, places its VMs, and undoes both.
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

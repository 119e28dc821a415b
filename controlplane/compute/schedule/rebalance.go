package schedule

import (
	"cmp"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Move is the proposal to move one VM to another host.
type Move struct {
	VM       cloud.VMID
	Name     string
	From, To cloud.NodeID
	// Before and After are the use of the fuller of the two hosts before and after the move (see Use).
	Before, After float64
}

// Plan is the result of Rebalance. Before and After describe the cloud before and after all moves.
type Plan struct {
	Moves         []Move
	Before, After Balance
}

// Balance has the use of the READY host with the highest and with the lowest use. Both are 0 if there are no such
// hosts.
type Balance struct{ Highest, Lowest float64 }

// MinGain is the minimum by which a move must reduce the use of the fuller host. A move costs time and network traffic,
// so moves with a smaller gain are not proposed.
const MinGain = 0.05

// Use returns the allocated part, from 0 to 1, of that resource of a host of which the largest part is allocated.
func Use(n *cloud.Node) float64 {
	use := 0.0
	for _, r := range [][2]uint64{
		{uint64(n.Allocated.VCPUs), uint64(n.Allocatable.VCPUs)},
		{n.Allocated.MemoryMiB, n.Allocatable.MemoryMiB},
		{n.Allocated.StorageGiB, n.Allocatable.StorageGiB},
		{n.Allocated.HugepagesMiB, n.HugepagesMiB},
		{uint64(n.Allocated.DedicatedVCPUs), uint64(n.DedicatedCPUs)},
	} {
		if r[1] > 0 {
			use = max(use, float64(r[0])/float64(r[1]))
		}
	}
	return use
}

// Rebalance proposes moves that make the use of the READY hosts more equal, at most the number most. The source of each
// move is the fullest host from which a move gains at least MinGain, and the target is the host that Place chooses. Of
// the VMs on the source, Rebalance chooses the one whose move leaves the lowest use of the fuller host. A VM is moved
// at most once, and is not moved if the new host is worse for its soft groups or its spread.
func Rebalance(s *Snapshot, most int) Plan {
	b := &balancer{trial: newTrial(s), vms: map[cloud.NodeID][]*SnapshotVM{}}
	for i := range s.Hosts {
		if n := &s.Hosts[i].Node; n.State(s.Now, s.Hosts[i].LastSeen) == cloud.NodeReady {
			b.ready = append(b.ready, n.ID)
		}
	}
	for i := range s.VMs {
		if vm := &s.VMs[i]; vm.Immovable == "" {
			b.vms[vm.Node] = append(b.vms[vm.Node], vm)
		}
	}
	for _, vms := range b.vms {
		sortVMs(vms)
	}
	out := Plan{Before: b.balance()}
	for len(out.Moves) < most {
		m, ok := b.next()
		if !ok {
			break
		}
		out.Moves = append(out.Moves, m)
	}
	out.After = b.balance()
	return out
}

type balancer struct {
	*trial
	ready []cloud.NodeID
	// vms has, by host, the VMs that can be moved and have not been moved yet.
	vms map[cloud.NodeID][]*SnapshotVM
}

func (b *balancer) use(id cloud.NodeID) float64 { return Use(&b.index.hosts[id].node) }

func (b *balancer) balance() (out Balance) {
	for i, id := range b.ready {
		use := b.use(id)
		out.Highest = max(out.Highest, use)
		if i == 0 || use < out.Lowest {
			out.Lowest = use
		}
	}
	return out
}

// next makes the next move in the trial and returns it. It returns false if no move gains MinGain.
func (b *balancer) next() (Move, bool) {
	lowest := b.balance().Lowest
	slices.SortFunc(b.ready, func(x, y cloud.NodeID) int { return cmp.Or(cmp.Compare(b.use(y), b.use(x)), cmp.Compare(x, y)) })
	for _, from := range b.ready {
		if b.use(from)-lowest < MinGain {
			break // no host is emptier by that much
		}
		var best *SnapshotVM
		var move Move
		for _, vm := range b.vms[from] {
			m := b.try(vm, from)
			if m.To != "" && m.Before-m.After >= MinGain && (best == nil || m.After < move.After) {
				best, move = vm, m
			}
		}
		if best != nil {
			b.take(best, from)
			b.add(best, move.To)
			b.vms[from] = slices.DeleteFunc(b.vms[from], func(vm *SnapshotVM) bool { return vm == best })
			return move, true
		}
	}
	return Move{}, false
}

// try returns the move of the VM to the host that Place chooses, without making it. To is empty if no host fits, or if
// the new host is worse for the VM's groups.
func (b *balancer) try(vm *SnapshotVM, from cloud.NodeID) Move {
	b.take(vm, from)
	defer b.add(vm, from)
	r := b.request(vm, map[cloud.NodeID]string{from: "is the VM's present host"})
	chosen := b.index.Place(r)
	if chosen.Node == "" {
		return Move{}
	}
	q := b.index.newQuery(r)
	now, then := q.rankOf(b.index.hosts[from]), q.rankOf(b.index.hosts[chosen.Node])
	for _, x := range []*rank{&now, &then} { // compare only the groups
		x.missing, x.distance, x.id = 0, 0, ""
	}
	if then.compare(now) > 0 {
		return Move{}
	}
	out := Move{VM: vm.Request.VM, Name: vm.Name, From: from, To: chosen.Node}
	b.add(vm, from)
	out.Before = max(b.use(from), b.use(chosen.Node))
	b.take(vm, from)
	b.add(vm, chosen.Node)
	out.After = max(b.use(from), b.use(chosen.Node))
	b.take(vm, chosen.Node)
	return out
}

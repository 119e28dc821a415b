package schedule

import (
	"cmp"
	"maps"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Snapshot is the state of a cloud at one time, for FindLosses and Rebalance.
type Snapshot struct {
	Now   cloud.Time
	Hosts []SnapshotHost
	VMs   []SnapshotVM
}

// SnapshotHost is a host with the time of its last heartbeat.
type SnapshotHost struct {
	Node     cloud.Node
	LastSeen cloud.Time
}

// SnapshotVM is a VM that is placed on a host.
type SnapshotVM struct {
	Name string
	Node cloud.NodeID
	// Request describes the host that the VM requires. Its fields VM and Need must be set. Now and Groups are not used.
	Request Request
	Groups  VMGroups
	// Recovers is true if the control plane starts the VM on another host when its host is lost.
	Recovers bool
	// Priority orders the VMs of a lost host: higher numbers are placed first.
	Priority int
	// Immovable is the reason why Rebalance cannot move the VM to another host. It is empty if the VM can be moved.
	Immovable string
}

// VMGroups has the keys of the groups of a VM. Equal keys of a kind are one group. An empty key means that the VM is in
// no group of the kind.
type VMGroups struct {
	Affinity, AntiAffinity, AffinitySoft, AntiAffinitySoft string
	// Spread is the key of the spread group, and SpreadLabel the label of hosts to spread over.
	Spread, SpreadLabel string
}

// key returns the key of the group of a kind, unique over the kinds, or "". The kinds are numbered in the order of the
// fields.
func (g *VMGroups) key(kind int) string {
	key := [...]string{g.Affinity, g.AntiAffinity, g.AffinitySoft, g.AntiAffinitySoft, g.Spread}[kind]
	if key == "" {
		return ""
	}
	return string(rune('0'+kind)) + key
}

const groupKinds = 5

// trial is a copy of a snapshot in which VMs can be moved.
type trial struct {
	now     cloud.Time
	index   *Index
	members map[string]map[cloud.NodeID]int // by VMGroups.key
}

func newTrial(s *Snapshot) *trial {
	t := &trial{now: s.Now, index: NewIndex(), members: map[string]map[cloud.NodeID]int{}}
	for i := range s.Hosts {
		t.index.Put(&s.Hosts[i].Node, s.Hosts[i].LastSeen)
	}
	for i := range s.VMs {
		t.join(&s.VMs[i], s.VMs[i].Node, 1)
	}
	return t
}

// join adds n, which may be negative, to the number of members on a host of each of the VM's groups.
func (t *trial) join(vm *SnapshotVM, node cloud.NodeID, n int) {
	if node == "" {
		return
	}
	for kind := range groupKinds {
		key := vm.Groups.key(kind)
		if key == "" {
			continue
		}
		if t.members[key] == nil {
			t.members[key] = map[cloud.NodeID]int{}
		}
		if t.members[key][node] += n; t.members[key][node] == 0 {
			delete(t.members[key], node)
		}
	}
}

// place chooses a host for the VM. The VM must not count as a member of its groups.
func (t *trial) place(vm *SnapshotVM, skip map[cloud.NodeID]string) Decision {
	return t.index.Place(t.request(vm, skip))
}

func (t *trial) request(vm *SnapshotVM, skip map[cloud.NodeID]string) *Request {
	r := vm.Request
	r.Now, r.Groups = t.now, Groups{SpreadLabel: vm.Groups.SpreadLabel}
	for kind, at := range []*map[cloud.NodeID]int{&r.Affinity, &r.AntiAffinity, &r.AffinitySoft, &r.AntiAffinitySoft, &r.Spread} {
		*at = t.members[vm.Groups.key(kind)]
	}
	if len(skip) > 0 {
		r.Skip = maps.Clone(r.Skip)
		if r.Skip == nil {
			r.Skip = map[cloud.NodeID]string{}
		}
		maps.Copy(r.Skip, skip)
	}
	return &r
}

// add allocates the VM's capacity on a host, and adds the VM to the members of its groups there.
func (t *trial) add(vm *SnapshotVM, node cloud.NodeID) {
	t.index.Allocate(node, vm.Request.Need)
	t.join(vm, node, 1)
}

// take undoes add.
func (t *trial) take(vm *SnapshotVM, node cloud.NodeID) {
	t.index.Free(node, vm.Request.Need)
	t.join(vm, node, -1)
}

func sortVMs(vms []*SnapshotVM) {
	slices.SortFunc(vms, func(a, b *SnapshotVM) int { return cmp.Compare(a.Request.VM, b.Request.VM) })
}

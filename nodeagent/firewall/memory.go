package firewall

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// memory is a cache of the kernel's state in the namespace of a VPC. A call that succeeds fills the cache. The cache is
// valid as long as no other program changes the kernel's state.
type memory struct {
	cookie uint64        // of the namespace
	vpc    cloud.HostVPC // the input of the call; no caller has its slices
	state  *state        // rendered from vpc
}

// memories holds a memory for each VPC of which the last call succeeded.
type memories struct {
	mu sync.Mutex
	of map[cloud.VPCID]*memory // guarded by mu
}

// take removes and returns the memory of a VPC. It returns nil if there is none.
func (m *memories) take(id cloud.VPCID) *memory {
	m.mu.Lock()
	defer m.mu.Unlock()
	one := m.of[id]
	delete(m.of, id)
	return one
}

func (m *memories) keep(id cloud.VPCID, one *memory) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.of[id] = one
}

// namespaceCookie returns a number that identifies the calling thread's network namespace until the next boot (Linux
// 5.14). The inode of a namespace does not: the kernel gives the inode of a deleted namespace to a new one.
func namespaceCookie() (uint64, error) {
	socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open a socket: %w", err)
	}
	defer unix.Close(socket)
	cookie, err := unix.GetsockoptUint64(socket, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("identify the network namespace: %w", err)
	}
	return cookie, nil
}

// kernel returns the kernel's state according to the memory.
func (m *memory) kernel() *kernelState {
	k := &kernelState{sets: make(map[string]*kernelSet, len(m.state.sets)), bridge: m.state.bridge.kernel()}
	for i := range m.state.sets {
		s := &m.state.sets[i]
		k.sets[s.name] = &kernelSet{usable: true, ipv6: s.ipv6, addresses: s.addresses}
	}
	for i := range m.state.tables {
		k.tables[i] = m.state.tables[i].kernel()
		if l := &m.state.tables[i].lists; len(l.lists) > 0 {
			k.sets[l.name] = &kernelSet{usable: true, ipv6: l.ipv6, lists: l.lists}
		}
	}
	return k
}

// change makes the kernel's state equal to vpc, without reading what m has, and changes m accordingly. After an error,
// m is invalid.
func (f *Firewall) change(ctx context.Context, ns netns.NsHandle, m *memory, vpc *cloud.HostVPC, r *Result) error {
	if equalRules(&m.vpc, vpc) {
		if edits, ok := m.memberEdits(vpc.Members); ok {
			return m.editMembers(ctx, ns, edits, r)
		}
	}
	next := copyVPC(vpc)
	want, err := render(&next, &f.options)
	if err != nil {
		return err
	}
	have, restricts := m.kernel(), mayForbid(&m.vpc, &next)
	loose := m.vpc.LooseTCP != next.LooseTCP
	m.vpc, m.state = next, want
	if loose {
		if err := setSysctls(want.looseTCP, r); err != nil {
			return err
		}
	}
	if err := f.write(ctx, ns, have, want, r); err != nil || !restricts {
		return err
	}
	return revoke(ctx, ns, want.policy, r)
}

// maxEdits is the greatest number of different addresses of a group for which editMembers is used.
const maxEdits = 64

// memberEdit is a change of the addresses of a group. It replaces the addresses from index first up to end, without
// end.
type memberEdit struct {
	group          int // index in HostVPC.Members
	first, end     int
	replacement    []netip.Addr
	added, removed []netip.Addr // what the change adds to and removes from the group
}

// memberEdits returns the differences of want to the groups' members in m. It returns false if the groups differ or if
// a group has more than maxEdits differences.
func (m *memory) memberEdits(want []cloud.GroupMembers) ([]memberEdit, bool) {
	have := m.vpc.Members
	if len(have) != len(want) {
		return nil, false
	}
	var edits []memberEdit
	for i := range want {
		// Of groups with the same ID, only the last one counts.
		if have[i].ID != want[i].ID || i > 0 && want[i].ID <= want[i-1].ID {
			return nil, false
		}
		e := compareMembers(have[i].Addresses, want[i].Addresses, m.state.policy.rules.members[want[i].ID])
		if len(e.replacement) > maxEdits || e.end-e.first > maxEdits {
			return nil, false
		}
		if e.end > e.first || len(e.replacement) > 0 {
			e.group = i
			edits = append(edits, e)
		}
	}
	return edits, true
}

// compareMembers returns the shortest replacement of a part of have that results in want. The lists may contain an
// address more than once. members is the set of the addresses in have.
func compareMembers(have, want []netip.Addr, members map[netip.Addr]bool) memberEdit {
	first := 0
	for first < len(have) && first < len(want) && have[first] == want[first] {
		first++
	}
	tail := 0
	for tail < len(have)-first && tail < len(want)-first && have[len(have)-1-tail] == want[len(want)-1-tail] {
		tail++
	}
	e := memberEdit{first: first, end: len(have) - tail, replacement: want[first : len(want)-tail]}
	if len(e.replacement) > maxEdits || e.end-e.first > maxEdits {
		return e
	}
	for _, a := range e.replacement {
		if !members[a] {
			e.added = append(e.added, a)
		}
	}
	for _, a := range have[first:e.end] {
		if !slices.Contains(want, a) {
			e.removed = append(e.removed, a)
		}
	}
	return e
}

// editMembers changes the members of groups in the kernel and in m. No chain and no other set depends on them. All
// additions precede the removals: an address that moves from one group to another is always in one of them.
func (m *memory) editMembers(ctx context.Context, ns netns.NsHandle, edits []memberEdit, r *Result) error {
	if len(edits) == 0 {
		return nil
	}
	k, err := openMembers(ctx, ns, nil)
	if err != nil {
		return err
	}
	defer k.close()
	for _, e := range edits {
		if err := m.editSets(ctx, k, e.group, e.added, true, r); err != nil {
			return err
		}
	}
	gone := map[netip.Addr]bool{}
	for _, e := range edits {
		if err := m.editSets(ctx, k, e.group, e.removed, false, r); err != nil {
			return err
		}
		for _, a := range e.removed {
			gone[a] = true
		}
		group := &m.vpc.Members[e.group]
		group.Addresses = slices.Replace(group.Addresses, e.first, e.end, e.replacement...)
	}
	if len(gone) == 0 {
		return nil
	}
	return revokeOf(ctx, ns, m.state.policy, gone, r)
}

// editSets adds addresses to a group, which has an index in HostVPC.Members, or removes them. A group to which no rule
// of an IP version refers has no set of this version.
func (m *memory) editSets(
	ctx context.Context, k *members, group int, addresses []netip.Addr, add bool, r *Result,
) error {
	id := m.vpc.Members[group].ID
	for _, ipv6 := range []bool{false, true} {
		name := groupSet(id, ipv6)
		i, exists := slices.BinarySearchFunc(m.state.sets, name, func(s addressSet, name string) int {
			return cmp.Compare(s.name, name)
		})
		if !exists {
			continue
		}
		operation := k.handle.IpsetDel
		if add {
			operation = k.handle.IpsetAdd
		}
		list := ofFamily(addresses, ipv6)
		if err := k.change(ctx, name, list, operation, r); err != nil {
			return fmt.Errorf("change the set %s: %w", name, err)
		}
		m.state.sets[i].edit(list, add)
	}
	members := m.state.policy.rules.members[id]
	for _, a := range addresses {
		if add {
			members[a] = true
		} else {
			delete(members, a)
		}
	}
	return nil
}

// edit adds addresses to the set or removes them.
func (s *addressSet) edit(addresses []netip.Addr, add bool) {
	for _, a := range addresses {
		at, found := slices.BinarySearchFunc(s.addresses, a, netip.Addr.Compare)
		switch {
		case add && !found:
			s.addresses = slices.Insert(s.addresses, at, a)
		case !add && found:
			s.addresses = slices.Delete(s.addresses, at, at+1)
		}
	}
}

// ofFamily returns the addresses of one IP version, sorted and without duplicates.
func ofFamily(list []netip.Addr, ipv6 bool) []netip.Addr {
	family := map[netip.Addr]bool{}
	for _, a := range list {
		if a.Is6() == ipv6 {
			family[a] = true
		}
	}
	return slices.SortedFunc(maps.Keys(family), netip.Addr.Compare)
}

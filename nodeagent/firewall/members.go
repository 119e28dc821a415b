package firewall

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const (
	setType     = "hash:ip"
	listSetType = "hash:net"
	// swapName is the name of a set while it is filled, before it takes the place of another set.
	swapName = prefix + "new"
	// maxElements is the kernel's limit for the elements of one set. A VPC has at most 2^24 IPv4 addresses.
	maxElements = 1 << 24
	// maxExtra is the number of obsolete addresses above which a set is replaced at once instead of address by address,
	// which takes one netlink request of about 25 µs for each.
	maxExtra = 1000
)

// members changes the ipsets of a network namespace.
type members struct {
	handle *netlink.Handle
	have   map[string]*kernelSet
}

// kernelSet is an ipset as the kernel has it.
type kernelSet struct {
	usable    bool // of the right type
	ipv6      bool
	addresses []netip.Addr            // sorted
	lists     map[netip.Prefix]listID // of a listSet
}

// readSets returns the package's sets of the namespace by name.
func readSets(ctx context.Context, ns netns.NsHandle) (map[string]*kernelSet, error) {
	m, err := openMembers(ctx, ns, map[string]*kernelSet{})
	if err != nil {
		return nil, err
	}
	defer m.close()
	if err := m.read(); err != nil {
		return nil, fmt.Errorf("list the sets of addresses: %w", err)
	}
	return m.have, nil
}

// openMembers returns the members of a namespace that has the sets in have.
func openMembers(ctx context.Context, ns netns.NsHandle, have map[string]*kernelSet) (*members, error) {
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	if deadline, ok := ctx.Deadline(); ok {
		if err := handle.SetSocketTimeout(max(time.Until(deadline), time.Millisecond)); err != nil {
			handle.Close()
			return nil, fmt.Errorf("open netlink: %w", err)
		}
	}
	return &members{handle: handle, have: have}, nil
}

func (m *members) close() { m.handle.Close() }

func (m *members) read() error {
	list, err := m.list()
	if err != nil {
		return err
	}
	// The kernel sends a large set in several messages. Only the first of them has the type.
	for _, part := range list {
		if !strings.HasPrefix(part.SetName, prefix) {
			continue
		}
		set := m.have[part.SetName]
		if set == nil {
			set = newKernelSet(&part)
			m.have[part.SetName] = set
		}
		for _, entry := range part.Entries {
			a, ok := netip.AddrFromSlice(entry.IP)
			switch {
			case ok && set.lists == nil:
				set.addresses = append(set.addresses, a)
			case ok && entry.Packets != nil:
				set.lists[netip.PrefixFrom(a, int(entry.CIDR))] = listID(*entry.Packets)
			}
		}
	}
	for _, set := range m.have {
		slices.SortFunc(set.addresses, netip.Addr.Compare)
	}
	return nil
}

func newKernelSet(part *netlink.IPSetResult) *kernelSet {
	set := &kernelSet{ipv6: part.Family == unix.AF_INET6}
	set.usable = part.TypeName == setType
	if isListSet(part.SetName) {
		set.usable = part.TypeName == listSetType && part.CadtFlags&nl.IPSET_FLAG_WITH_COUNTERS != 0
		set.lists = map[netip.Prefix]listID{}
	}
	set.usable = set.usable && part.Timeout == nil && part.MaxElements == maxElements
	return set
}

// list returns all sets of the namespace. The calling goroutine is locked to a thread (package nsthread), and package
// netlink passes each attribute of an element from one goroutine to another. On the calling goroutine, each of these
// steps would be a switch between threads, about four for each element. So list calls netlink on a goroutine of its
// own, which is not locked.
func (m *members) list() (list []netlink.IPSetResult, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		list, err = m.handle.IpsetListAll()
	}()
	<-done
	return list, err
}

// grow creates missing sets and adds missing addresses.
func (m *members) grow(ctx context.Context, want []addressSet, r *Result) error {
	for i := range want {
		set := &want[i]
		have, err := m.usable(set.name, set.ipv6)
		if err != nil {
			return err
		}
		if have == nil {
			err = m.create(ctx, set.name, set, r)
		} else {
			err = m.change(ctx, set.name, missing(set.addresses, have.addresses), m.handle.IpsetAdd, r)
		}
		if err != nil {
			return fmt.Errorf("add to the set %s: %w", set.name, err)
		}
	}
	return nil
}

// usable returns the set that the kernel has, or nil if there is none. It fails if the set has another type.
func (m *members) usable(name string, ipv6 bool) (*kernelSet, error) {
	have := m.have[name]
	if have != nil && (!have.usable || have.ipv6 != ipv6) {
		return nil, fmt.Errorf("the set %s has another type or limit than the agent gives it: "+
			"remove the rules that refer to it and destroy it", name)
	}
	return have, nil
}

// shrink removes addresses and sets that are not wanted. No rule may refer to the sets any more.
func (m *members) shrink(ctx context.Context, want *state, r *Result) error {
	wanted := map[string]bool{}
	for i := range want.tables {
		if lists := &want.tables[i].lists; len(lists.lists) > 0 {
			wanted[lists.name] = true
		}
	}
	for i := range want.sets {
		set := &want.sets[i]
		wanted[set.name] = true
		have := m.have[set.name]
		if have == nil {
			continue
		}
		extra := missing(have.addresses, set.addresses)
		var err error
		if len(extra) > maxExtra {
			err = m.replace(ctx, set, r)
		} else {
			err = m.change(ctx, set.name, extra, m.handle.IpsetDel, r)
		}
		if err != nil {
			return fmt.Errorf("remove from the set %s: %w", set.name, err)
		}
	}
	for name := range m.have {
		if wanted[name] {
			continue
		}
		if err := m.destroy(ctx, name); err != nil {
			return fmt.Errorf("destroy the set %s: %w", name, err)
		}
		r.Writes++
	}
	return nil
}

// destroy removes a set that no rule refers to. The kernel drops the reference of a deleted rule only after a grace
// period of RCU, so destroy repeats its request while the set is in use.
func (m *members) destroy(ctx context.Context, name string) error {
	for {
		err := m.handle.IpsetDestroy(name)
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if !errors.Is(err, nl.IPSetError(nl.IPSET_ERR_BUSY)) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// create makes a set with the addresses of want.
func (m *members) create(ctx context.Context, name string, want *addressSet, r *Result) error {
	options := netlink.IpsetCreateOptions{Family: unix.AF_INET, MaxElements: maxElements}
	if want.ipv6 {
		options.Family = unix.AF_INET6
	}
	if err := m.handle.IpsetCreate(name, setType, options); err != nil {
		return err
	}
	r.Writes++
	return m.change(ctx, name, want.addresses, m.handle.IpsetAdd, r)
}

// replace exchanges the content of an existing set at once: it fills a second set and swaps the two.
func (m *members) replace(ctx context.Context, want *addressSet, r *Result) error {
	if err := m.destroy(ctx, swapName); err != nil {
		return err
	}
	delete(m.have, swapName)
	if err := m.create(ctx, swapName, want, r); err != nil {
		return err
	}
	if err := m.handle.IpsetSwap(swapName, want.name); err != nil {
		return err
	}
	r.Writes += 2
	return m.destroy(ctx, swapName)
}

// change calls operation for each of the addresses.
func (m *members) change(ctx context.Context, name string, addresses []netip.Addr,
	operation func(string, *netlink.IPSetEntry) error, r *Result) error {
	for _, a := range addresses {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := operation(name, &netlink.IPSetEntry{IP: a.AsSlice(), Replace: true}); err != nil {
			return fmt.Errorf("%s: %w", a, err)
		}
		r.Writes++
	}
	return nil
}

// missing returns the addresses of the sorted list want that are not in the sorted list have.
func missing(want, have []netip.Addr) []netip.Addr {
	var list []netip.Addr
	for _, a := range want {
		for len(have) > 0 && have[0].Less(a) {
			have = have[1:]
		}
		if len(have) == 0 || have[0] != a {
			list = append(list, a)
		}
	}
	return list
}

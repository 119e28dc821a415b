package firewall

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// listSetRevision is the first revision of the ipset type hash:net whose elements can have counters (Linux 3.11).
const listSetRevision = 3

func isListSet(name string) bool {
	return name == setName("lists", false, "") || name == setName("lists", true, "")
}

// prefixes returns the prefixes of the set, sorted.
func (l *listSet) prefixes() []netip.Prefix {
	return slices.SortedFunc(maps.Keys(l.lists), comparePrefixes)
}

// text writes the commands of ipset that create the set.
func (l *listSet) text(b *strings.Builder) {
	if len(l.lists) == 0 {
		return
	}
	version := "inet"
	if l.ipv6 {
		version = "inet6"
	}
	fmt.Fprintf(b, "create %s %s family %s maxelem %d counters\n", l.name, listSetType, version, maxElements)
	for _, p := range l.prefixes() {
		text := p.String()
		if p.IsSingleIP() {
			text = p.Addr().String()
		}
		fmt.Fprintf(b, "add %s %s packets %d\n", l.name, text, uint64(l.lists[p]))
	}
}

// createLists makes a set with its elements, unless the set has none.
func (m *members) createLists(ctx context.Context, want *listSet, r *Result) error {
	if len(want.lists) == 0 {
		return nil
	}
	options := netlink.IpsetCreateOptions{
		Family: unix.AF_INET, MaxElements: maxElements, Counters: true, Revision: listSetRevision,
	}
	if want.ipv6 {
		options.Family = unix.AF_INET6
	}
	if err := m.handle.IpsetCreate(want.name, listSetType, options); err != nil {
		return fmt.Errorf("create the set %s: %w", want.name, err)
	}
	r.Writes++
	m.have[want.name] = &kernelSet{usable: true, ipv6: want.ipv6, lists: map[netip.Prefix]listID{}}
	return m.growLists(ctx, want, r)
}

// growLists adds missing elements to an existing set, and changes those with another list.
func (m *members) growLists(ctx context.Context, want *listSet, r *Result) error {
	if len(want.lists) == 0 {
		return nil
	}
	have := m.have[want.name].lists
	for _, p := range want.prefixes() {
		if id, exists := have[p]; exists && id == want.lists[p] {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := m.assign(want.name, p, want.lists[p]); err != nil {
			return fmt.Errorf("add %s to the set %s: %w", p, want.name, err)
		}
		r.Writes++
	}
	return nil
}

// shrinkLists removes the elements that are not wanted. If no elements are wanted, shrinkLists does nothing, because
// shrink removes the whole set.
func (m *members) shrinkLists(ctx context.Context, want *listSet, r *Result) error {
	have := m.have[want.name]
	if have == nil || len(want.lists) == 0 {
		return nil
	}
	for _, p := range slices.SortedFunc(maps.Keys(have.lists), comparePrefixes) {
		if _, wanted := want.lists[p]; wanted {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		entry := &netlink.IPSetEntry{IP: p.Addr().AsSlice(), CIDR: uint8(p.Bits()), Replace: true}
		if err := m.handle.IpsetDel(want.name, entry); err != nil {
			return fmt.Errorf("remove %s from the set %s: %w", p, want.name, err)
		}
		r.Writes++
	}
	return nil
}

// assign adds an element with a list to a set, or changes the list of an existing element. It builds the netlink
// message itself, because package netlink cannot set counters.
func (m *members) assign(set string, p netip.Prefix, id listID) error {
	request := nl.NewNetlinkRequest(nl.IPSET_CMD_ADD|unix.NFNL_SUBSYS_IPSET<<8, nl.GetIpsetFlags(nl.IPSET_CMD_ADD))
	request.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_NETLINK, Version: nl.NFNETLINK_V0})
	request.AddData(nl.NewRtAttr(nl.IPSET_ATTR_PROTOCOL, nl.Uint8Attr(nl.IPSET_PROTOCOL)))
	request.AddData(nl.NewRtAttr(nl.IPSET_ATTR_SETNAME, nl.ZeroTerminated(set)))
	family := nl.IPSET_ATTR_IPADDR_IPV4
	if p.Addr().Is6() {
		family = nl.IPSET_ATTR_IPADDR_IPV6
	}
	address := nl.NewRtAttr(nl.IPSET_ATTR_IP|int(nl.NLA_F_NESTED), nil)
	address.AddChild(nl.NewRtAttr(family|int(nl.NLA_F_NET_BYTEORDER), p.Addr().AsSlice()))
	element := nl.NewRtAttr(nl.IPSET_ATTR_DATA|int(nl.NLA_F_NESTED), nil)
	element.AddChild(address)
	element.AddChild(nl.NewRtAttr(nl.IPSET_ATTR_CIDR, nl.Uint8Attr(uint8(p.Bits()))))
	packets := binary.BigEndian.AppendUint64(nil, uint64(id))
	element.AddChild(nl.NewRtAttr(nl.IPSET_ATTR_PACKETS|int(nl.NLA_F_NET_BYTEORDER), packets))
	request.AddData(element)
	_, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	if errno, ok := err.(syscall.Errno); ok && errno >= nl.IPSET_ERR_PRIVATE {
		return nl.IPSetError(errno)
	}
	return err
}

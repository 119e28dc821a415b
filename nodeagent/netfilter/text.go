package netfilter

import (
	"net/netip"
	"slices"
	"strings"
)

// Elements returns an anonymous set or map with the given elements, sorted and without duplicates, so that the text
// does not depend on the order of list. It sorts list.
func Elements(list []string) string {
	slices.Sort(list)
	return "{ " + strings.Join(slices.Compact(list), ", ") + " }"
}

// Address returns the address in a field of a netlink message. An IPv4 address may have 4 or 16 bytes. The result is
// invalid for another length.
func Address(field []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(field)
	return a.Unmap()
}

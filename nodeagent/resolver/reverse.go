package resolver

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/miekg/dns"
)

// privatePrefixes are prefixes whose reverse names mean nothing outside of a network, from RFC 6303, RFC 6890 and RFC
// 7793.
var privatePrefixes = func() []netip.Prefix {
	var all []netip.Prefix
	for _, p := range []string{
		"0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.2.0/24",
		"192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "255.255.255.255/32",
		"::/128", "::1/128", "2001:db8::/32", "fc00::/7", "fe80::/10",
	} {
		all = append(all, netip.MustParsePrefix(p))
	}
	return all
}()

const (
	reverse4 = "in-addr.arpa."
	reverse6 = "ip6.arpa."
)

// parseReverse returns the prefix that a reverse name in lower case stands for: 10.in-addr.arpa. is 10.0.0.0/8. Labels
// that are no numbers end it, so that a name below a prefix (RFC 2317) stands for the prefix. It returns false for
// other names, and for the reverse domains themselves.
func parseReverse(name string) (netip.Prefix, bool) {
	var labels []string
	var bytes [16]byte
	bits := 0
	switch {
	case dns.IsSubDomain(reverse4, name):
		labels = dns.SplitDomainName(strings.TrimSuffix(name, reverse4))
		for _, label := range slices.Backward(labels) {
			n, err := strconv.ParseUint(label, 10, 8)
			if err != nil || bits == 32 {
				break
			}
			bytes[bits/8] = byte(n)
			bits += 8
		}
		p, _ := netip.AddrFrom4([4]byte(bytes[:4])).Prefix(bits)
		return p, bits > 0
	case dns.IsSubDomain(reverse6, name):
		labels = dns.SplitDomainName(strings.TrimSuffix(name, reverse6))
		for _, label := range slices.Backward(labels) {
			n, err := strconv.ParseUint(label, 16, 4)
			if err != nil || len(label) != 1 || bits == 128 {
				break
			}
			bytes[bits/8] |= byte(n) << (4 - bits%8)
			bits += 4
		}
		p, _ := netip.AddrFrom16(bytes).Prefix(bits)
		return p, bits > 0
	}
	return netip.Prefix{}, false
}

// reverseZone returns the name of the largest reverse zone that contains an address and is within the address's prefix
// of the given length. RFC 6303 divides the private prefixes in the same way: 172.16.0.0/12 is 16 zones.
func reverseZone(a netip.Addr, bits int) string {
	labels := dns.SplitDomainName(reverseName(a))
	unused := (32 - bits) / 8
	if a.Is6() {
		unused = (128 - bits) / 4
	}
	return dns.Fqdn(strings.Join(labels[unused:], "."))
}

// reverseName returns the reverse name of an address.
func reverseName(a netip.Addr) string {
	name, _ := dns.ReverseAddr(a.String()) // fails only for a string that is no address
	return name
}

package resolver

import (
	"net"
	"net/netip"

	"github.com/miekg/dns"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Times in seconds for which guests may cache local answers. They are short, because hosts come and go.
const (
	positiveTTL = 15
	negativeTTL = 5
)

// localDomains are domains that are never forwarded, besides the VPC's own. "internal" is reserved for private use by
// ICANN (resolution 2024.07.29.06), the others by RFC 6761, RFC 6762 and RFC 7686.
var localDomains = []string{"internal.", "localhost.", "local.", "invalid.", "onion."}

// local is the answer to a query that is not forwarded.
type local struct {
	rcode   int
	answers []dns.RR
	// apex is the name of the zone whose SOA record tells for how long a negative answer may be cached. "" if there is
	// none.
	apex string
}

// resolve returns the local answer to a question, or false if the question is to be forwarded.
func (z *zone) resolve(q dns.Question) (local, bool) {
	name := dns.CanonicalName(q.Name)
	if mutant.On(mutant.ForwardPrivate) {
		return local{}, false
	}
	switch {
	case q.Qclass != dns.ClassINET, q.Qtype == dns.TypeAXFR, q.Qtype == dns.TypeIXFR:
		return local{rcode: dns.RcodeRefused}, true
	case q.Qtype == dns.TypeANY: // RFC 8482
		return local{answers: []dns.RR{&dns.HINFO{Hdr: header(q, dns.TypeHINFO), Cpu: "RFC8482"}}}, true
	case z.domain != "" && dns.IsSubDomain(z.domain, name):
		return z.resolveName(q, name), true
	case z.domain != "" && name != "." && dns.IsSubDomain(name, z.domain) && isLocalDomain(name):
		return local{apex: name}, true // a parent of the domain exists
	}
	if prefix, ok := parseReverse(name); ok {
		return z.resolveReverse(q, name, prefix)
	}
	for _, domain := range localDomains {
		if dns.IsSubDomain(domain, name) {
			return resolveLocalDomain(q, domain), true
		}
	}
	return local{}, false
}

// resolveName answers for a name in the VPC's domain.
func (z *zone) resolveName(q dns.Question, name string) local {
	l := local{apex: z.domain}
	addresses, isHost := z.hosts[name]
	switch {
	case name == z.domain && q.Qtype == dns.TypeSOA:
		l.answers = []dns.RR{soa(z.domain)}
	case isHost:
		for _, a := range addresses {
			if a.Is4() && q.Qtype == dns.TypeA {
				l.answers = append(l.answers, &dns.A{Hdr: header(q, dns.TypeA), A: net.IP(a.AsSlice())})
			} else if a.Is6() && q.Qtype == dns.TypeAAAA {
				l.answers = append(l.answers, &dns.AAAA{Hdr: header(q, dns.TypeAAAA), AAAA: net.IP(a.AsSlice())})
			}
		}
	case name != z.domain && !z.parents[name]:
		l.rcode = dns.RcodeNameError
	}
	return l
}

// resolveReverse answers for a name that stands for a prefix, unless the prefix is public and not in the VPC. Names of
// prefixes exist without records: NXDOMAIN would say that no address in them has a name (RFC 8020).
func (z *zone) resolveReverse(q dns.Question, name string, prefix netip.Prefix) (local, bool) {
	host := z.names[prefix.Addr()]
	exists := !prefix.IsSingleIP() || host != "" && name == reverseName(prefix.Addr())
	for _, zones := range [][]netip.Prefix{z.clients, privatePrefixes} {
		for _, p := range zones {
			if p.Bits() <= prefix.Bits() && p.Contains(prefix.Addr()) {
				l := local{apex: reverseZone(prefix.Addr(), p.Bits())}
				switch {
				case !exists:
					l.rcode = dns.RcodeNameError
				case prefix.IsSingleIP() && q.Qtype == dns.TypePTR:
					l.answers = []dns.RR{&dns.PTR{Hdr: header(q, dns.TypePTR), Ptr: host}}
				}
				return l, true
			}
		}
	}
	return local{}, false
}

// resolveLocalDomain answers for a name in one of localDomains.
func resolveLocalDomain(q dns.Question, domain string) local {
	l := local{apex: domain}
	switch {
	case domain == "localhost." && q.Qtype == dns.TypeA:
		l.answers = []dns.RR{&dns.A{Hdr: header(q, dns.TypeA), A: net.IPv4(127, 0, 0, 1)}}
	case domain == "localhost." && q.Qtype == dns.TypeAAAA:
		l.answers = []dns.RR{&dns.AAAA{Hdr: header(q, dns.TypeAAAA), AAAA: net.IPv6loopback}}
	case domain != "localhost." && dns.CanonicalName(q.Name) != domain:
		l.rcode = dns.RcodeNameError
	}
	return l
}

// isLocalDomain reports whether a name is in one of localDomains.
func isLocalDomain(name string) bool {
	for _, domain := range localDomains {
		if dns.IsSubDomain(domain, name) {
			return true
		}
	}
	return false
}

// addTo puts the answer into a reply.
func (l local) addTo(m *dns.Msg) {
	m.Rcode, m.Answer = l.rcode, l.answers
	m.Authoritative = l.rcode != dns.RcodeRefused
	if len(l.answers) == 0 && l.apex != "" {
		m.Ns = []dns.RR{soa(l.apex)}
	}
}

// header returns the header of a record that answers q. Its name has the case of the question, which some clients
// check.
func header(q dns.Question, kind uint16) dns.RR_Header {
	return dns.RR_Header{Name: q.Name, Rrtype: kind, Class: dns.ClassINET, Ttl: positiveTTL}
}

// soa returns the SOA record of a local zone. Its TTL and Minttl limit the caching of negative answers (RFC 2308).
func soa(apex string) *dns.SOA {
	return &dns.SOA{
		Hdr: dns.RR_Header{Name: apex, Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: negativeTTL},
		Ns:  apex, Mbox: "hostmaster." + apex, Serial: 1, Refresh: 3600, Retry: 600, Expire: 86400, Minttl: negativeTTL,
	}
}

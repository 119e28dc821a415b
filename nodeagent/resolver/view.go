package resolver

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"github.com/miekg/dns"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// View is the wanted state of a server: its addresses, its clients and the names of its VPC.
type View struct {
	// Listen are the addresses of the gateways.
	Listen []netip.Addr
	// Clients are the prefixes from which queries are answered. Reverse names in them are never forwarded.
	Clients []netip.Prefix
	// Domain is the domain of the hosts without a dot at its end, such as "shop.internal". It may be empty: then hosts
	// are not found by name.
	Domain string
	Hosts  []Host
}

// Host is a name with its addresses.
type Host struct {
	// Name is relative to the domain and may have several labels, such as "web" or "api.production".
	Name      string
	Addresses []netip.Addr
}

// ViewOf returns the view of a VPC. Its hosts are the ports that have names, on this host and on others, and the
// service IPs. A service IP with the name of a port is not in the view: the name keeps the meaning that it has without
// service IPs.
func ViewOf(vpc *cloud.HostVPC, domain string) View {
	v := View{Domain: domain}
	for _, prefix := range []netip.Prefix{vpc.CIDR, vpc.CIDR6} {
		if prefix.IsValid() {
			v.Clients = append(v.Clients, prefix)
		}
	}
	add := func(name string, addresses ...netip.Addr) {
		addresses = slices.DeleteFunc(addresses, func(a netip.Addr) bool { return !a.IsValid() })
		if name != "" && len(addresses) > 0 {
			v.Hosts = append(v.Hosts, Host{Name: name, Addresses: addresses})
		}
	}
	for i := range vpc.Subnets {
		s := &vpc.Subnets[i]
		v.Listen = append(v.Listen, s.Gateway)
		if gateway := s.Gateway6(); gateway.IsValid() {
			v.Listen = append(v.Listen, gateway)
		}
		for _, p := range s.Ports {
			add(p.HostName, p.IP, p.IP6)
		}
		for _, p := range s.Remotes {
			add(p.HostName, p.IP, p.IP6)
		}
	}
	ports := len(v.Hosts)
	for _, s := range vpc.Services {
		if !slices.ContainsFunc(v.Hosts[:ports], func(h Host) bool { return strings.EqualFold(h.Name, s.Name) }) {
			add(s.Name, s.Address)
		}
	}
	return v
}

func (v *View) equal(other View) bool { return reflect.DeepEqual(*v, other) }

// zone is a View, indexed by names and addresses. It is not changed after newZone.
type zone struct {
	clients []netip.Prefix
	// domain is fully qualified and in lower case; "" if there is none. So are all names below.
	domain string
	hosts  map[string][]netip.Addr
	// names are the names of addresses. Of several names of an address it is the first one of the view.
	names map[netip.Addr]string
	// parents are names that are not hosts but have hosts below them. They exist, without records (RFC 8020).
	parents map[string]bool
}

func newZone(v View) *zone {
	z := &zone{
		clients: v.Clients,
		hosts:   map[string][]netip.Addr{},
		names:   map[netip.Addr]string{},
		parents: map[string]bool{},
	}
	if v.Domain == "" {
		return z
	}
	z.domain = dns.CanonicalName(v.Domain)
	for _, h := range v.Hosts {
		name := dns.CanonicalName(h.Name + "." + z.domain)
		if _, ok := dns.IsDomainName(name); !ok {
			continue // longer than DNS permits
		}
		z.hosts[name] = append(z.hosts[name], h.Addresses...)
		for _, a := range h.Addresses {
			if _, ok := z.names[a]; !ok {
				z.names[a] = name
			}
		}
		for parent := parentOf(name); parent != z.domain && len(parent) > len(z.domain); parent = parentOf(parent) {
			z.parents[parent] = true
		}
	}
	return z
}

// parentOf returns a name without its first label.
func parentOf(name string) string {
	_, parent, _ := strings.Cut(name, ".")
	return parent
}

// hasClient reports whether queries from an address are answered.
func (z *zone) hasClient(a netip.Addr) bool {
	if mutant.On(mutant.OpenResolver) {
		return true
	}
	return slices.ContainsFunc(z.clients, func(p netip.Prefix) bool { return p.Contains(a) })
}

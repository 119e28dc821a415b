package dhcp

import (
	"net"
	"net/netip"

	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// The messages per second and in a burst that a port may send; further ones are ignored. A booting guest sends about
// ten.
const (
	requestRate  = 5
	requestBurst = 30
)

// table is a Subnet, indexed by the MAC addresses of its ports. It is not changed after newTable.
type table struct {
	subnet  Subnet
	clients map[cloud.MAC]*client
	// advertised is the ICMPv6 message of router advertisements; nil if there are none.
	advertised []byte
}

// client is a port that may send requests.
type client struct {
	port    cloud.HostPort
	limiter *rate.Limiter
}

// newTable returns the table of s. Ports that are also in old, which may be nil, keep their rate limiters.
func newTable(s Subnet, old *table) *table {
	t := &table{subnet: s, clients: map[cloud.MAC]*client{}}
	if !s.DHCP {
		return t
	}
	for _, p := range s.Ports {
		c := &client{port: p}
		if old != nil && old.clients[p.MAC] != nil {
			c.limiter = old.clients[p.MAC].limiter
		} else {
			c.limiter = rate.NewLimiter(requestRate, requestBurst)
		}
		t.clients[p.MAC] = c
	}
	if s.CIDR6.IsValid() {
		t.advertised = advertisement(s)
	}
	return t
}

// answer returns the frame that answers p, or nil if it is not answered. note is a line for the log, or "".
func (t *table) answer(c *client, p packet) (reply []byte, note string) {
	switch {
	case p.isDHCPv4():
		return answer4(t.subnet, c.port, p)
	case p.isDHCPv6():
		return answer6(t.subnet, c.port, p)
	case p.isRouterSolicitation() && t.advertised != nil && c.port.IP6.IsValid():
		return advertisementFrame(t.advertised, c.port.MAC), ""
	}
	return nil, ""
}

// dnsServers returns the resolvers of one address family that the subnet announces. Without any in the subnet, these
// are the gateway's addresses.
func (s *Subnet) dnsServers(ipv6 bool) []net.IP {
	var servers []net.IP
	all := s.DNS
	if len(all) == 0 {
		all = []netip.Addr{s.Gateway, s.Gateway6()}
	}
	for _, a := range all {
		if a.IsValid() && a.Is6() == ipv6 {
			servers = append(servers, a.AsSlice())
		}
	}
	return servers
}

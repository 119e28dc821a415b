package edge

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// serviceLab is a VPC on three hosts with a service IP, whose backends are the ports 11, 12 and 13, one on each host.
type serviceLab struct {
	*lab
	vpcs    []*cloud.HostVPC
	address cloud.HostGateway // the floating IP
}

const (
	serviceAddress  = "10.0.1.50:80"
	floatingService = "203.0.113.60:80"
)

func newServiceLab(t *testing.T, affinity cloud.Affinity) *serviceLab {
	s := &serviceLab{lab: newLab(t, 3), address: cloud.HostGateway{
		ID: "f", ServiceIP: "s", VNI: 301, HostNAT: cloud.HostNAT{External: internet, Address: parseAddr("203.0.113.60")},
	}}
	s.joinUnderlay()
	s.vpcs = s.spread("a")
	for _, v := range s.vpcs {
		v.Subnets[0].Ports[0].Hairpin = true
	}
	s.setBackends(affinity, 11, 12, 13)
	for i := range s.hosts {
		name := fmt.Sprint("backend ", i+1)
		s.serveLines(s.backend(i), ":7070", name)
	}
	return s
}

// setBackends makes the ports with the given last bytes of their addresses the healthy backends of the service IP.
func (s *serviceLab) setBackends(affinity cloud.Affinity, healthy ...byte) {
	for _, v := range s.vpcs {
		one := cloud.HostService{
			ID: "s", Address: parseAddr("10.0.1.50"), Floating: s.address.Address, Affinity: affinity,
			Ports: []cloud.ServicePort{{Protocol: cloud.ProtocolTCP, Port: 80, Target: 7070}},
		}
		for n := byte(11); n <= 13; n++ {
			b := cloud.HostBackend{Address: parseAddr(fmt.Sprint("10.0.1.", n)), Weight: 1}
			for _, h := range healthy {
				b.Healthy = b.Healthy || h == n
			}
			one.Backends = append(one.Backends, b)
		}
		v.Services = []cloud.HostService{one}
	}
}

// backend returns the namespace of the port on the host with an index.
func (s *serviceLab) backend(i int) string {
	return s.hosts[i].guest(s.vpcs[i], s.vpcs[i].Subnets[0].Ports[0].ID)
}

// requireBackends requires that connections from a namespace all succeed, and reach all the given backends and no
// others. The backends must see the source of the connections as seen, unless this is "": a guest's connection to
// itself comes from the gateway.
func (s *serviceLab) requireBackends(from, to, seen string, backends ...string) {
	s.t.Helper()
	reached := map[string]bool{}
	for range 40 {
		c, err := s.dial(from, to, patience)
		require.NoError(s.t, err)
		if seen != "" {
			require.Equal(s.t, seen, c.seen)
		}
		name, err := c.lines.ReadString('\n')
		require.NoError(s.t, err)
		reached[name[:len(name)-1]] = true
		c.Close()
	}
	var want = map[string]bool{}
	for _, b := range backends {
		want[b] = true
	}
	require.Equal(s.t, want, reached)
}

// TestFloatingServiceIP requires that clients outside reach the backends on all hosts through the floating IP of a
// service IP, with their own addresses. It also requires this of unhealthy backends, after the floating IP has moved,
// with routes of subnets to a NAT gateway, and of clients with affinity.
func TestFloatingServiceIP(t *testing.T) {
	s := newServiceLab(t, cloud.AffinityNone)
	place(s.vpcs, s.address, 0)
	s.applyGateways(0, 1, 2)
	const client = "203.0.113.1"
	s.requireBackends("internet", floatingService, client, "backend 1", "backend 2", "backend 3")
	for i := range s.hosts {
		for _, to := range []string{serviceAddress, floatingService} {
			s.requireBackends(s.backend(i), to, "", "backend 1", "backend 2", "backend 3")
		}
	}

	t.Log("an unhealthy backend gets no connections, and without healthy backends they are refused")
	s.setBackends(cloud.AffinityNone, 12)
	s.applyGateways(0, 1, 2)
	s.requireBackends("internet", floatingService, client, "backend 2")
	s.setBackends(cloud.AffinityNone)
	s.applyGateways(0, 1, 2)
	_, err := s.dial("internet", floatingService, patience)
	require.ErrorIs(t, err, unix.ECONNREFUSED)
	_, err = s.dial("internet", "203.0.113.60:81", patience)
	require.ErrorIs(t, err, unix.ECONNREFUSED)

	t.Log("answers return to the host with the floating IP although the backends have other routes")
	s.setBackends(cloud.AffinityNone, 11, 12, 13)
	nat := func(address string) cloud.HostNAT {
		return cloud.HostNAT{External: internet, Address: parseAddr(address)}
	}
	main := cloud.HostGateway{ID: "main", VNI: 201, Default: true, HostNAT: nat("203.0.113.50")}
	other := cloud.HostGateway{ID: "other", VNI: 202, HostNAT: nat("203.0.113.51")}
	place(s.vpcs, main, 1)
	place(s.vpcs, other, 2)
	for _, v := range s.vpcs {
		v.Subnets[0].Routes = []cloud.HostRoute{{
			Destination: parsePrefix("203.0.113.0/24"), Target: cloud.RouteNAT, Gateway: "other",
		}}
	}
	s.applyGateways(0, 1, 2)
	s.requireBackends("internet", floatingService, client, "backend 1", "backend 2", "backend 3")
	s.requireDial(s.backend(0), outside, "203.0.113.50")

	t.Log("the floating IP moves")
	open := s.requireDial("internet", floatingService, client)
	_, err = open.lines.ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, open.echo(patience))
	place(s.vpcs, s.address, -1)
	s.applyGateways(0, 1, 2)
	s.requireNoDial("internet", floatingService, "no host has the floating IP")
	require.Error(t, open.echo(blocked))
	place(s.vpcs, s.address, 2)
	s.applyGateways(0, 1, 2)
	s.requireBackends("internet", floatingService, client, "backend 1", "backend 2", "backend 3")

	t.Log("the connections of the floating IP are repaired with the kernel's state")
	for _, damage := range []string{"rule delete priority 32700", "route flush table 100000301", "link delete vt301"} {
		for i, h := range s.hosts {
			s.IP(h.inside(s.vpcs[i]), "%s", damage)
		}
		s.applyGateways(0, 1, 2)
		s.requireBackends("internet", floatingService, client, "backend 1", "backend 2", "backend 3")
	}

	place(s.vpcs, s.address, -1)
	for _, v := range s.vpcs {
		v.Services = nil
	}
	s.applyGateways(0, 1, 2)
	for i, h := range s.hosts {
		text := s.IP(h.inside(s.vpcs[i]), "link") + s.IP(h.inside(s.vpcs[i]), "rule") +
			s.IP(h.inside(s.vpcs[i]), "route show table all")
		require.NotContains(t, text, "301")
		require.NotContains(t, text, "203.0.113.60")
	}
}

// TestFloatingServiceAffinity requires that a client outside always reaches the same backend of a service IP with
// affinity, and that clients are distributed over all backends.
func TestFloatingServiceAffinity(t *testing.T) {
	s := newServiceLab(t, cloud.AffinityClientIP)
	place(s.vpcs, s.address, 1)
	s.applyGateways(0, 1, 2)
	reached := map[string]bool{}
	for n := range 16 {
		address := fmt.Sprintf("203.0.113.%d", 200+n)
		s.IP("internet", "address add %s/24 dev eth0", address)
		first := ""
		for range 3 {
			c, err := s.dialAs("internet", address, floatingService, patience)
			require.NoError(t, err)
			require.Equal(t, address, c.seen)
			name, err := c.lines.ReadString('\n')
			require.NoError(t, err)
			if first == "" {
				first = name
			}
			require.Equal(t, first, name)
			c.Close()
		}
		reached[first] = true
	}
	require.Len(t, reached, 3)
}

// TestFloatingServiceGroups requires that the rules of the backends' security groups decide about connections to the
// floating IP of a service IP by the address of the client, on the host with the floating IP as on the others.
func TestFloatingServiceGroups(t *testing.T) {
	s := newServiceLab(t, cloud.AffinityNone)
	place(s.vpcs, s.address, 0)
	s.IP("internet", "address add 203.0.113.9/24 dev eth0")
	for _, v := range s.vpcs {
		v.Subnets[0].Ports[0].Groups = []cloud.SecurityGroupID{"closed"}
		v.Groups[0].Rules = append(v.Groups[0].Rules, cloud.Rule{Direction: cloud.Ingress, Protocol: cloud.ProtocolTCP,
			Ports: cloud.PortRange{First: 7070, Last: 7070}, CIDR: parsePrefix("203.0.113.1/32")})
	}
	s.applyGateways(0, 1, 2)
	s.requireBackends("internet", floatingService, "203.0.113.1", "backend 1", "backend 2", "backend 3")
	for _, healthy := range []byte{11, 12, 13} {
		s.setBackends(cloud.AffinityNone, healthy)
		s.applyGateways(0, 1, 2)
		_, err := s.dialAs("internet", "203.0.113.9", floatingService, blocked)
		require.Error(t, err, "no rule permits the client's address")
	}
}

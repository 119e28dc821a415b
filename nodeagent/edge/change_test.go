package edge

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// vpcA returns the state of a host with one VPC.
func (s *randomStage) vpcA(change func(*VPC)) State {
	v := VPC{ID: "a", Namespace: s.Path("a"), CIDR: parsePrefix("10.0.0.0/16")}
	change(&v)
	return State{VPCs: []VPC{v}}
}

// TestGatewayBesideFloatingIP requires that a VPC with a floating IP can get a default NAT gateway and lose it again.
func TestGatewayBesideFloatingIP(t *testing.T) {
	s := newRandomStage(t, 1)
	without := s.vpcA(func(v *VPC) {
		v.Floating = []cloud.HostFloating{floating("203.0.113.110", "10.0.1.10"), floating("203.0.113.111", "10.0.1.11")}
	})
	with := s.vpcA(func(v *VPC) {
		v.NAT, v.Floating = &cloud.HostNAT{External: internet}, without.VPCs[0].Floating
	})
	for i, want := range []State{without, with, without} {
		s.apply(want)
		s.requireModel(i, want)
	}
}

// TestHostAddressChanges requires that the host's address in an external network can be changed to another address of
// the network.
func TestHostAddressChanges(t *testing.T) {
	s := newRandomStage(t, 1)
	want := s.vpcA(func(v *VPC) { v.NAT = &cloud.HostNAT{External: internet} })
	s.apply(want)
	s.requireModel(0, want)
	x := s.options.External[internet]
	x.Address = parsePrefix("203.0.113.5/24")
	s.options.External[internet] = x
	s.restart()
	s.apply(want)
	s.requireModel(1, want)
}

// TestRerouted requires that a guest that keeps sending UDP packets from one port gets answers again after the route
// of its subnet has changed to another gateway.
func TestRerouted(t *testing.T) {
	s := newRandomStage(t, 1)
	for i, gateway := range []cloud.NATGatewayID{"g", "h", "", "g"} {
		want := s.vpcA(func(v *VPC) {
			v.NAT = &cloud.HostNAT{External: "office"}
			for _, g := range []string{"g 203.0.113.110 vt1", "h 203.0.113.111 vt2"} {
				v.Gateways = append(v.Gateways, Gateway{
					ID: cloud.NATGatewayID(g[:1]), HostNAT: cloud.HostNAT{External: internet, Address: parseAddr(g[2:15])},
					Transit: g[16:],
				})
			}
			v.Subnets = []SubnetRoutes{{VNI: 1, Bridge: "br1", Routes: []Route{{parsePrefix("198.51.100.0/24"), gateway}}}}
		})
		s.apply(want)
		s.requireModel(i, want)
	}
}

// TestAddressOfTwoVPCs applies a state in which two VPCs have the same floating IP, as while the floating IP moves from
// one to the other. Packets to the floating IP must reach the first of the VPCs, and the other connections of both VPCs
// must continue.
func TestAddressOfTwoVPCs(t *testing.T) {
	s := newRandomStage(t, 1)
	address := floating("203.0.113.110", "10.0.1.10")
	state := func(a, b bool) State {
		var out State
		for id, has := range map[cloud.VPCID]bool{"a": a, "b": b} {
			v := VPC{ID: id, Namespace: s.Path(string(id)), CIDR: parsePrefix("10.0.0.0/16"), NAT: &cloud.HostNAT{External: internet}}
			if has {
				v.Floating = []cloud.HostFloating{address}
			}
			out.VPCs = append(out.VPCs, v)
		}
		return out
	}
	s.apply(state(true, false))
	s.requireModel(0, state(true, false))
	r, err := s.edge.Set(t.Context(), state(true, true))
	require.Empty(t, r)
	own, general := ErrorsOf(err, "b")
	require.ErrorContains(t, own, "VPC b: 203.0.113.110 belongs to a already")
	require.NoError(t, general)
	own, _ = ErrorsOf(err, "a")
	require.NoError(t, own)
	s.requireModel(1, state(true, false))
	s.apply(state(false, true))
	s.requireModel(2, state(false, true))
}

// TestAnnouncementIsRepeated requires that the address of a floating IP that was added while the interface was down is
// announced when the interface is up.
func TestAnnouncementIsRepeated(t *testing.T) {
	s := newRandomStage(t, 1)
	s.apply(s.vpcA(func(*VPC) {}))
	s.IP("host", "link set eth1 down")
	want := s.vpcA(func(v *VPC) { v.Floating = []cloud.HostFloating{floating("203.0.113.110", "10.0.1.10")} })
	r, err := s.edge.Set(t.Context(), want)
	require.NoError(t, err)
	require.Empty(t, r.Announced)
	s.IP("host", "link set eth1 up")
	require.Eventually(t, func() bool {
		r, err = s.edge.Set(t.Context(), want)
		require.NoError(t, err)
		return len(r.Announced) > 0
	}, patience, 20*time.Millisecond)
	require.Equal(t, []netip.Addr{parseAddr("203.0.113.110")}, r.Announced)
	require.Empty(t, r.Changes)
	s.apply(want)
	s.requireModel(0, want)
}

// TestErrorsOf requires that ErrorsOf returns, for a VPC, the errors that concern this VPC and those that concern no
// single VPC.
func TestErrorsOf(t *testing.T) {
	one, other := &VPCError{"a", errors.New("one")}, &VPCError{"b", errors.New("other")}
	network := errors.New("network")
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	for _, test := range []struct {
		err          error
		own, general string
	}{
		{nil, "", ""},
		{one, "VPC a: one", ""},
		{other, "", ""},
		{network, "", "network"},
		{fmt.Errorf("set: %w", errors.Join(network, errors.Join(other, fmt.Errorf("again: %w", one)))), "VPC a: one", "network"},
	} {
		own, general := ErrorsOf(test.err, "a")
		require.Equal(t, []string{test.own, test.general}, []string{text(own), text(general)})
	}
}

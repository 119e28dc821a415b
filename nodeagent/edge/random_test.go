package edge

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// randomStates returns the number of states of TestRandomStates: TRIVET_EDGE_STATES, or 6.
func randomStates(t *testing.T) int {
	if text := os.Getenv("TRIVET_EDGE_STATES"); text != "" {
		n, err := strconv.Atoi(text)
		require.NoError(t, err)
		return n
	}
	return 6
}

// TestRandomStates applies random states to a host, with failures, restarts and changes by hand between them. After
// each state, the packets between guests and the outside must be translated as the model says, flows that began under
// an earlier state must pass if new ones do, and the host must answer ARP requests for the addresses of the state only.
// The kernel's state must be the one that a new host would have.
func TestRandomStates(t *testing.T) {
	seed := uint64(1)
	if text := os.Getenv("TRIVET_EDGE_SEED"); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		require.NoError(t, err)
	}
	s := newRandomStage(t, seed)
	pristine := s.dump()
	for round := range randomStates(t) {
		for range s.random.IntN(3) {
			s.disturb()
		}
		want := s.state()
		s.apply(want)
		s.requireModel(round, want)
		if round%3 > 0 {
			continue
		}
		before := s.dump()
		require.NoError(t, s.edge.Remove(t.Context()))
		require.Equal(t, pristine, s.dump(), "Remove leaves something")
		s.apply(want)
		require.Equal(t, s.dump(), before, "round %d: the state differs from that of a new host: %+v", round, want)
	}
}

// disturb applies a random state that fails or is interrupted, restarts the Edge with other options, or damages the
// kernel's state.
func (s *randomStage) disturb() {
	s.t.Helper()
	edge := "host-" + namespaceName
	kind := s.random.IntN(7)
	s.t.Log("disturbance", kind)
	switch kind {
	case 0:
		ctx, cancel := context.WithTimeout(s.t.Context(), time.Duration(s.random.IntN(60))*time.Millisecond)
		defer cancel()
		_, _ = s.edge.Set(ctx, s.state())
	case 1:
		require.NoError(s.t, os.WriteFile(s.failing, nil, 0o600))
		_, _ = s.edge.Set(s.t.Context(), s.state())
		require.NoError(s.t, os.Remove(s.failing))
	case 2: // a state in which two VPCs have one address
		want := s.state()
		for i := range want.VPCs {
			want.VPCs[i].Floating = append(want.VPCs[i].Floating, floating("203.0.113.200", "10.0.1.99"))
		}
		_, err := s.edge.Set(s.t.Context(), want)
		require.Equal(s.t, len(want.VPCs) > 1, err != nil)
	case 3: // the marks and tables of the external networks, and an address of the host
		options := map[string]External{}
		for name, x := range s.options.External {
			options[name] = x
		}
		if _, has := options["another"]; has {
			delete(options, "another")
		} else {
			options["another"] = External{Interface: "eth3", Address: parsePrefix("198.18.0.2/24")}
		}
		x := options[internet]
		x.Address = parsePrefix(pick(s.random, "203.0.113.2/24", "203.0.113.5/24"))
		options[internet] = x
		s.options.External = options
		s.restart()
	case 4:
		if _, err := os.Stat(s.Path(edge)); err != nil {
			return
		}
		var devices []string
		for _, line := range strings.Split(s.IP(edge, "-o link"), "\n") {
			fields := strings.Fields(line)
			if len(fields) > 1 && fields[1] != "lo:" {
				name, _, _ := strings.Cut(strings.TrimSuffix(fields[1], ":"), "@")
				devices = append(devices, name)
			}
		}
		if len(devices) > 0 {
			s.IP(edge, "link %s %s", pick(s.random, "delete", "set down"), pick(s.random, devices...))
		}
	case 5:
		vpc := string(pick(s.random, stageVPCs...))
		s.Exec(vpc, "nft", "flush", "ruleset")
		s.IP(vpc, "route flush table all proto static")
	case 6:
		_, err := s.edge.Withdraw(s.t.Context())
		require.NoError(s.t, err)
		_, err = s.edge.Set(s.t.Context(), s.state())
		require.NoError(s.t, err)
		s.edge.Resume()
	}
}

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

// state returns a random valid state.
func (s *randomStage) state() (out State) {
	used := map[netip.Addr]bool{}
	address := func(network string) netip.Addr {
		for {
			a := netip.AddrFrom4([4]byte{203, 0, 113, byte(100 + s.random.IntN(24))})
			if network == "office" {
				a = netip.AddrFrom4([4]byte{192, 0, 2, byte(100 + s.random.IntN(24))})
			}
			if !used[a] {
				used[a] = true
				return a
			}
		}
	}
	nat := func() cloud.HostNAT {
		n := cloud.HostNAT{External: pick(s.random, internet, "office")}
		if s.random.IntN(2) == 0 {
			n.Address = address(n.External)
		}
		return n
	}
	for _, id := range stageVPCs {
		if s.random.IntN(8) == 0 {
			continue
		}
		v := VPC{
			ID: id, Namespace: s.Path(string(id)), CIDR: parsePrefix("10.0.0.0/16"), Withhold: s.random.IntN(5) == 0,
		}
		if s.random.IntN(3) > 0 {
			n := nat()
			v.NAT = &n
		}
		for i := range s.random.IntN(3) {
			v.Gateways = append(v.Gateways, Gateway{
				ID: cloud.NATGatewayID(fmt.Sprint("gateway-", i)), HostNAT: nat(), Transit: fmt.Sprint("vt", 300+i),
			})
		}
		v.Subnets = s.subnetRoutes(&v)
		if s.random.IntN(4) == 0 {
			v.Gateways = append(v.Gateways, Gateway{
				ID: "service", HostNAT: cloud.HostNAT{External: internet, Address: address(internet)}, Transit: "vt400", Mark: 400,
			})
		}
		for _, fixed := range fixedAddresses {
			if s.random.IntN(3) == 0 {
				network := pick(s.random, internet, "office")
				v.Floating = append(v.Floating, cloud.HostFloating{Address: address(network), External: network, Fixed: fixed})
			}
		}
		out.VPCs = append(out.VPCs, v)
	}
	return out
}

// subnetRoutes returns random routes to the gateways of a VPC.
func (s *randomStage) subnetRoutes(v *VPC) []SubnetRoutes {
	if len(v.Gateways) == 0 || s.random.IntN(4) == 0 {
		return nil
	}
	routes := SubnetRoutes{VNI: 1, Bridge: "br1"}
	for _, destination := range []string{"0.0.0.0/0", "198.51.100.0/24", "198.51.100.1/32"} {
		if s.random.IntN(2) == 0 {
			route := Route{Destination: parsePrefix(destination)}
			if s.random.IntN(4) > 0 {
				route.Gateway = pick(s.random, v.Gateways...).ID
			}
			routes.Routes = append(routes.Routes, route)
		}
	}
	return []SubnetRoutes{routes}
}

package edge

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// apply calls Set until Set succeeds, because the devices of a deleted namespace exist for a short time after the
// namespace. Applying the state again must change nothing.
func (s *randomStage) apply(want State) {
	s.t.Helper()
	var err error
	require.Eventually(s.t, func() bool {
		_, err = s.edge.Set(s.t.Context(), want)
		return err == nil
	}, patience, 50*time.Millisecond, "%+v: %v", want, lastError{&err})
	r, err := s.edge.Set(s.t.Context(), want)
	require.NoError(s.t, err)
	require.Empty(s.t, r, "%+v", want)
}

// translated returns the source address of a packet from a guest to the server of the internet, or "" if the packet is
// dropped.
func (s *randomStage) translated(v *VPC, fixed netip.Addr) string {
	source := func(n *cloud.HostNAT) string {
		if n.Address.IsValid() {
			return n.Address.String()
		}
		return s.options.External[n.External].Address.Addr().String()
	}
	if g := gatewayFor(v, distant.Addr()); g != nil {
		return source(&g.HostNAT)
	}
	for _, f := range v.Floating {
		if f.Fixed == fixed {
			return f.Address.String()
		}
	}
	if v.NAT != nil {
		return source(v.NAT)
	}
	return ""
}

// gatewayFor returns the gateway to which the routes of the guest's subnet lead packets for an address. It returns nil
// for the default gateway.
func gatewayFor(v *VPC, to netip.Addr) *Gateway {
	var best *Route
	for i := range v.Subnets {
		for j := range v.Subnets[i].Routes {
			r := &v.Subnets[i].Routes[j]
			if r.Destination.Contains(to) && (best == nil || r.Destination.Bits() > best.Destination.Bits()) {
				best = r
			}
		}
	}
	for i := range v.Gateways {
		if best != nil && v.Gateways[i].ID == best.Gateway {
			return &v.Gateways[i]
		}
	}
	return nil
}

// requireModel compares the translation of packets with the state.
func (s *randomStage) requireModel(round int, want State) {
	s.t.Helper()
	var mu sync.Mutex // guards problems
	var problems []string
	var running sync.WaitGroup
	check := func(what string, p *probe, source, server string, exact bool) {
		within := patience
		if server == "" {
			within = 150 * time.Millisecond
		}
		running.Go(func() {
			gotSource, gotServer := p.ask(min(within, time.Second))
			if gotServer != server {
				// The packet may have shown that the route of a flow has changed.
				_, err := s.edge.Set(s.t.Context(), want)
				assert.NoError(s.t, err)
				gotSource, gotServer = p.ask(within)
			}
			if gotServer != server || exact && gotSource != source {
				mu.Lock()
				defer mu.Unlock()
				problems = append(problems, fmt.Sprintf("%s: want %q at %q, got %q at %q", what, source, server, gotSource, gotServer))
			}
		})
	}
	answered := map[string]bool{}
	for _, id := range stageVPCs {
		v := VPC{}
		if i := slices.IndexFunc(want.VPCs, func(v VPC) bool { return v.ID == id }); i >= 0 {
			v = want.VPCs[i]
		}
		for _, n := range v.translations() {
			if n.Address.IsValid() && !v.Withhold {
				answered[n.Address.String()] = true
			}
		}
		for _, f := range v.Floating {
			answered[f.Address.String()] = true
			inward := s.probe("world", netip.Addr{}, netip.AddrPortFrom(f.Address, distant.Port()))
			source, server := addressIn(f.External), "g"+string(id)
			if gatewayFor(&v, parseAddr(source)) != nil {
				source, server = "", "" // the answers leave through the gateway, which drops them
			}
			check(fmt.Sprintf("to %s", f.Address), inward, source, server, true)
		}
		for _, fixed := range fixedAddresses {
			key := fmt.Sprintf("from %s of %s", fixed, id)
			source, server := s.translated(&v, fixed), "world"
			withheld := v.Withhold && isGatewayAddress(&v, source)
			if source == "" {
				server = ""
			}
			if withheld {
				continue // whether replies arrive depends on the neighbour's cache
			}
			check(key, s.probe("g"+string(id), fixed, distant), source, server, true)
			if s.old[key] == nil {
				s.old[key] = s.probe("g"+string(id), fixed, distant)
			}
			check("old flow "+key, s.old[key], "any", server, false)
		}
	}
	running.Wait()
	require.Empty(s.t, problems, "round %d: %+v", round, want)
	var have []string
	for _, line := range strings.Split(strings.TrimSpace(s.IP("host-"+namespaceName, "neighbour show proxy")), "\n") {
		if line != "" {
			have = append(have, strings.Fields(line)[0])
		}
	}
	require.ElementsMatch(s.t, have, keysOf(answered), "round %d: %+v", round, want)
}

// isGatewayAddress reports whether an address is one of a NAT gateway of the VPC.
func isGatewayAddress(v *VPC, address string) bool {
	return slices.ContainsFunc(v.translations(), func(n *cloud.HostNAT) bool {
		return n.Address.IsValid() && n.Address.String() == address
	})
}

func keysOf(m map[string]bool) (out []string) {
	for key := range m {
		out = append(out, key)
	}
	return out
}

// addressIn returns the address of the namespace "world" in an external network.
func addressIn(network string) string {
	if network == "office" {
		return "192.0.2.1"
	}
	return "203.0.113.1"
}

// lastError is a fmt.Stringer. Its text is that of the error variable at the time of formatting.
type lastError struct{ err *error }

func (e lastError) String() string { return fmt.Sprint(*e.err) }

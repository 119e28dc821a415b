package vpc

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

func parseNAT(id string, args map[string]string) cloud.NATGatewayOnHost {
	n := cloud.NATGatewayOnHost{NATGateway: cloud.NATGateway{
		ID: cloud.NATGatewayID(id), VPC: cloud.VPCID(args["vpc"]), External: "internet",
		Placement: cloud.Placement{Node: cloud.NodeID(args["node"])},
	}, ServiceIP: cloud.ServiceIPID(args["service"])}
	_, n.Default = args["default"]
	if args["address"] != "" {
		n.Address = netip.MustParseAddr(args["address"])
	}
	if n.Node != "" && args["vtep"] != "none" {
		n.VTEP = vtepOf(n.Node)
	}
	fmt.Sscan(args["vni"], &n.VNI)
	fmt.Sscan(args["gen"], &n.BindingGeneration)
	return n
}

// showGateways prints how a host translates the connections of a VPC, and the state for package edge.
func showGateways(b *strings.Builder, w *wanted) {
	if w.NAT != nil {
		fmt.Fprintf(b, "translates to %s of %s\n", w.NAT.Address, w.NAT.External)
	}
	for _, g := range w.Gateways {
		fmt.Fprintf(b, "gateway %s vni %d default %t at %s", g.ID, g.VNI, g.Default, g.VTEP)
		if g.ServiceIP != "" {
			fmt.Fprintf(b, " of service IP %s", g.ServiceIP)
		}
		b.WriteString("\n")
	}
	for _, f := range w.Floating {
		fmt.Fprintf(b, "floating IP %s to %s\n", f.Address, f.Fixed)
	}
	state := edgeState(&w.HostVPC, "", func(external string) bool { return external == "internet" })
	for _, g := range state.Gateways {
		fmt.Fprintf(b, "edge: gateway %s with %s from %s", g.ID, g.Address, g.Transit)
		if g.Mark != 0 {
			fmt.Fprintf(b, " mark %d", g.Mark)
		}
		b.WriteString("\n")
	}
	for _, s := range state.Subnets {
		fmt.Fprintf(b, "edge: routes of %s: %v\n", s.Bridge, s.Routes)
	}
}

// gatewayOnTwoHosts applies an earlier binding of a NAT gateway to this host after a later one to another host. It
// reports whether this host announces the gateway's address.
func gatewayOnTwoHosts() bool {
	var tab tables
	record := func(node string, generation int) cloud.NATGatewayOnHost {
		return parseNAT("g", map[string]string{
			"vpc": "a", "node": node, "vni": "200", "address": "203.0.113.9", "default": "", "gen": fmt.Sprint(generation),
		})
	}
	tab.apply(&cloud.NetworkUpdate{
		Node: self, Snapshot: true, VPCs: []cloud.VPCOnHost{testVPC("a")}, NATGateways: []cloud.NATGatewayOnHost{record("n2", 2)},
	})
	tab.apply(&cloud.NetworkUpdate{Node: self, NATGateways: []cloud.NATGatewayOnHost{record(string(self), 1)}})
	w, _ := tab.hostVPC("a", selfVTEP)
	return w.NAT != nil
}

func TestEarlierGatewayIsIgnored(t *testing.T) { require.False(t, gatewayOnTwoHosts()) }

package live

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// edgeRecords is the witness's copy of the records that connect VPCs to the outside.
type edgeRecords struct {
	floating map[string]*cloud.FloatingIP
	nats     map[string]*cloud.NATGateway
	tables   map[string]*cloud.RouteTable
}

func newEdgeRecords() edgeRecords {
	return edgeRecords{
		floating: map[string]*cloud.FloatingIP{}, nats: map[string]*cloud.NATGateway{},
		tables: map[string]*cloud.RouteTable{},
	}
}

// checkEdge checks the records as of a revision: each external address has one user, a port has at most one floating IP
// and a VPC one default gateway, a subnet has one route table, and all of them refer to records that exist.
func (n *networkRecords) checkEdge() error {
	used := map[string]string{}
	use := func(what, user string) error {
		if other, taken := used[what]; taken {
			return fmt.Errorf("%s and %s both have %s", user, other, what)
		}
		used[what] = user
		return nil
	}
	for id, f := range n.edge.floating {
		if err := use("the address "+f.Address.String(), "floating IP "+id); err != nil {
			return err
		}
		if f.Port == "" {
			continue
		}
		if p := n.ports[string(f.Port)]; p == nil || p.IP != f.Fixed {
			return fmt.Errorf("floating IP %s leads to port %s with the address %s, which does not exist", id, f.Port, f.Fixed)
		}
		if err := use("port "+string(f.Port), "floating IP "+id); err != nil {
			return err
		}
	}
	for id, g := range n.edge.nats {
		if n.vpcs[string(g.VPC)] == nil {
			return fmt.Errorf("NAT gateway %s has no VPC", id)
		}
		if g.Address.IsValid() {
			if err := use("the address "+g.Address.String(), "NAT gateway "+id); err != nil {
				return err
			}
		}
		if g.Default {
			if err := use("VPC "+string(g.VPC)+" as default", "NAT gateway "+id); err != nil {
				return err
			}
		}
	}
	for id, table := range n.edge.tables {
		for _, s := range table.Subnets {
			if n.subnets[string(s)] == nil {
				return fmt.Errorf("route table %s has the subnet %s, which does not exist", id, s)
			}
			if err := use("subnet "+string(s), "route table "+id); err != nil {
				return err
			}
		}
		for _, r := range table.Routes {
			if g := n.edge.nats[r.ID]; r.Target == cloud.RouteNAT && (g == nil || g.VPC != table.VPC) {
				return fmt.Errorf("route table %s has a route to NAT gateway %s, which its VPC does not have", id, r.ID)
			}
		}
	}
	return nil
}

// compareEdge compares the records of a host with those of the witness. needs has the VPCs that the host needs.
// compareEdge returns the number of records that the host should have, and describes the first difference, if any.
func (n *networkRecords) compareEdge(
	needs map[cloud.VPCID]bool, records map[string]proto.Message,
) (count int, why string) {
	for id, f := range n.edge.floating {
		p := n.ports[string(f.Port)]
		if p == nil || !needs[p.VPC] {
			continue
		}
		count++
		r, _ := records[id].(*networkv1.FloatingIp)
		if r.GetAddress() != f.Address.String() || r.GetPortId() != string(f.Port) ||
			r.GetFixedAddress() != f.Fixed.String() {
			return count, fmt.Sprintf("has the floating IP %v, and should have %+v", r, f)
		}
	}
	for id, g := range n.edge.nats {
		if !needs[g.VPC] {
			continue
		}
		count++
		r, _ := records[id].(*networkv1.NatGateway)
		if on, ok := records[id].(*agentv1.HostNatGateway); ok && g.OnOneHost() {
			if r = on.GetNatGateway(); r.GetNodeId() != string(g.Node) || on.GetBindingGeneration() != g.BindingGeneration {
				return count, fmt.Sprintf("has the NAT gateway %v, and should have %+v", on, g)
			}
		}
		if r.GetVpcId() != string(g.VPC) || r.GetIsDefault() != g.Default || (r.GetAddress() != "") != g.Address.IsValid() {
			return count, fmt.Sprintf("has the NAT gateway %v, and should have %+v", r, g)
		}
	}
	for id, table := range n.edge.tables {
		if !needs[table.VPC] {
			continue
		}
		count++
		r, _ := records[id].(*networkv1.RouteTable)
		sameRoute := func(a cloud.Route, b *networkv1.Route) bool {
			return a.Destination.String() == b.GetDestination() && a.ID == b.GetTargetId() &&
				int32(a.Target) == int32(b.GetTargetType())
		}
		sameSubnet := func(a cloud.SubnetID, b string) bool { return string(a) == b }
		if r == nil || !slices.EqualFunc(table.Routes, r.GetRoutes(), sameRoute) ||
			!slices.EqualFunc(table.Subnets, r.GetSubnetIds(), sameSubnet) {
			return count, fmt.Sprintf("has the route table %v, and should have %+v", r, table)
		}
	}
	return count, ""
}

// servedTwice describes a floating IP, or a NAT gateway that is on one host, which two hosts serve according to their
// records. It returns "" if there is none.
func (n *networkRecords) servedTwice() string {
	servers := map[string]*host{}
	for _, h := range n.f.hosts {
		records, _ := h.networkRecords()
		for _, r := range records {
			what := servedBy(h, records, r)
			if what == "" {
				continue
			}
			if other := servers[what]; other != nil {
				return fmt.Sprintf("%s and %s both serve the %s", other.name, h.name, what)
			}
			servers[what] = h
		}
	}
	for what := range servers {
		if strings.HasPrefix(what, "floating IP") {
			n.f.count("floating IPs served")
		} else {
			n.f.count("NAT gateways served")
		}
	}
	return ""
}

// servedBy returns what a host serves because of one of its records: a floating IP of one of its ports, or a NAT gateway
// that is on it. It returns "" for other records.
func servedBy(h *host, records map[string]proto.Message, r proto.Message) string {
	switch r := r.(type) {
	case *networkv1.FloatingIp:
		port, _ := records[r.GetPortId()].(*agentv1.HostPort)
		if port.GetPort().GetNodeId() == string(h.node) {
			return "floating IP " + r.GetAddress()
		}
	case *agentv1.HostNatGateway:
		if r.GetNatGateway().GetNodeId() == string(h.node) {
			return "NAT gateway " + r.GetNatGateway().GetId()
		}
	}
	return ""
}

// exists reports whether there is a record with an ID.
func (e *edgeRecords) exists(id string) bool {
	return e.floating[id] != nil || e.nats[id] != nil || e.tables[id] != nil
}

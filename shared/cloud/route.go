package cloud

import "net/netip"

// RouteTable has the routes of some subnets of a VPC. Traffic within the VPC is always routed directly.
type RouteTable struct {
	ID           RouteTableID
	Name         string
	Org          OrgID
	Project      ProjectID
	Description  string
	VPC          VPCID
	Subnets      []SubnetID
	Routes       []Route
	Status       NetworkStatus
	StatusReason string
	CreatedAt    Time
	UpdatedAt    Time
}

// Route sends packets for a destination to a target. The route with the longest prefix decides.
type Route struct {
	Destination netip.Prefix
	Target      RouteTarget
	ID          string // of the target; empty for RouteBlackhole
}

// RouteTarget is the kind of a route's target. The numbers are those of network.v1.RouteTarget.
type RouteTarget uint8

const (
	// RoutePort is a port of the VPC with port security off, such as that of a VM which forwards packets.
	RoutePort RouteTarget = 1
	// RouteNAT is a NAT gateway.
	RouteNAT RouteTarget = 2
	// RouteBlackhole drops the packet.
	RouteBlackhole RouteTarget = 3
	// RoutePeering is another VPC.
	RoutePeering RouteTarget = 4
)

// Peering connects two VPCs of one or two projects.
type Peering struct {
	ID          PeeringID
	Name        string
	Description string
	// Org and Project are the project that proposed the peering, and VPC is its VPC.
	Org     OrgID
	Project ProjectID
	VPC     VPCID
	// PeerOrg, PeerProject and PeerVPC are the other side.
	PeerOrg     OrgID
	PeerProject ProjectID
	PeerVPC     VPCID
	// Status is NetworkPending until the other side has accepted.
	Status       NetworkStatus
	StatusReason string
	CreatedAt    Time
	UpdatedAt    Time
}

// CheckRoutes returns an InvalidArgument fault if a route is not complete, two routes have one destination, or a
// destination overlaps the VPC, whose local route always decides.
func CheckRoutes(vpc *VPC, routes []Route) error {
	if len(routes) > MaxRoutes {
		return invalid("routes", "max_items", "must be at most %d, got %d", MaxRoutes, len(routes))
	}
	seen := map[netip.Prefix]bool{}
	for _, r := range routes {
		local := vpc.CIDR
		if r.Destination.Addr().Is6() {
			local = vpc.CIDR6
		}
		switch {
		case local.IsValid() && within(local, r.Destination):
			return invalid("routes", "local", "%s is within the VPC, whose local route cannot be replaced", r.Destination)
		case seen[r.Destination]:
			return invalid("routes", "unique", "%s has two routes", r.Destination)
		case r.Target < RoutePort || r.Target > RoutePeering:
			return invalid("routes", "required", "the route for %s has no target_type", r.Destination)
		case (r.Target == RouteBlackhole) != (r.ID == ""):
			return invalid("routes", "target", "the route for %s: target_id is required, except for a blackhole", r.Destination)
		}
		seen[r.Destination] = true
	}
	return nil
}

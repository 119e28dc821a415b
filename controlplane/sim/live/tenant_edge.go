package live

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// The kinds of resources that connect VPCs to the outside.
const (
	kindFloating resourceKind = "floating IP"
	kindNAT      resourceKind = "NAT gateway"
	kindTable    resourceKind = "route table"
)

// externalNetwork has few addresses, so that they run out and are assigned again.
var externalNetwork = cloud.ExternalNetwork{
	Name: "internet", CIDR: netip.MustParsePrefix("203.0.113.0/24"),
	Pools: []cloud.AddressRange{{First: netip.MustParseAddr("203.0.113.10"), Last: netip.MustParseAddr("203.0.113.14")}},
}

// edge makes one random call for a floating IP, a NAT gateway or a route table.
func (t *tenantClient) edge(ctx context.Context) {
	switch n := t.rng.IntN(100); {
	case n < 20:
		t.createFloating(ctx)
	case n < 50:
		t.moveFloating(ctx)
	case n < 60:
		t.createNAT(ctx)
	case n < 70:
		t.createTable(ctx)
	case n < 85:
		t.changeTable(ctx)
	default:
		t.deleteResource(ctx, []resourceKind{kindFloating, kindFloating, kindNAT, kindTable}[t.rng.IntN(4)])
	}
}

// floatingTarget returns one of the tenant's ports, or no port.
func (t *tenantClient) floatingTarget() cloud.PortID {
	if port := t.pick(kindPort); port != nil && t.rng.IntN(4) > 0 {
		return cloud.PortID(port.id)
	}
	return ""
}

func (t *tenantClient) createFloating(ctx context.Context) {
	if len(t.networks[kindFloating]) >= mostResources[kindFloating] {
		return
	}
	q := network.FloatingRequest{Name: fmt.Sprintf("%s-%d", t.name, t.asks), Port: t.floatingTarget()}
	f, err, ok := askNetwork(ctx, t, "create a floating IP", func(
		ctx context.Context, p *process, body [32]byte,
	) (network.Result[cloud.FloatingIP], error) {
		return p.networks.CreateFloatingIP(ctx, tenant.Default, q, body)
	})
	if fault.Is(err, fault.FailedPrecondition) {
		return // the port has another floating IP
	}
	t.created(kindFloating, string(f.ID), "", err, ok)
}

// moveFloating makes a floating IP lead to another port, or to none.
func (t *tenantClient) moveFloating(ctx context.Context) {
	f := t.pick(kindFloating)
	if f == nil {
		return
	}
	port := t.floatingTarget()
	q := network.FloatingUpdate{ID: cloud.FloatingIPID(f.id), Port: &port}
	_, err, ok := askNetwork(ctx, t, "move a floating IP", func(
		ctx context.Context, p *process, body [32]byte,
	) (network.Result[cloud.FloatingIP], error) {
		return p.networks.UpdateFloatingIP(ctx, tenant.Default, q, body)
	})
	if ok && err == nil && port != "" {
		t.f.count("floating IPs moved")
	}
	t.refused("move a floating IP", err, fault.FailedPrecondition)
}

func (t *tenantClient) createNAT(ctx context.Context) {
	vpc := t.pick(kindVPC)
	if vpc == nil || len(t.networks[kindNAT]) >= mostResources[kindNAT] {
		return
	}
	q := network.NATRequest{
		Name: fmt.Sprintf("%s-%d", t.name, t.asks), VPC: cloud.VPCID(vpc.id), Default: t.rng.IntN(2) == 0,
		OwnAddress: t.rng.IntN(3) == 0,
	}
	nat, err, ok := askNetwork(ctx, t, "create a NAT gateway", func(
		ctx context.Context, p *process, body [32]byte,
	) (network.Result[cloud.NATGateway], error) {
		return p.networks.CreateNATGateway(ctx, tenant.Default, q, body)
	})
	if fault.Is(err, fault.AlreadyExists) {
		return // the VPC has another default gateway
	}
	t.created(kindNAT, string(nat.ID), vpc.id, err, ok)
}

// pickIn returns a random resource of a kind that certainly exists and has the given parent. It returns nil if it finds
// none in four attempts.
func (t *tenantClient) pickIn(kind resourceKind, parent string) *networkResource {
	for range 4 {
		if r := t.pick(kind); r != nil && r.parent == parent {
			return r
		}
	}
	return nil
}

// routes returns random routes for a route table of a VPC.
func (t *tenantClient) routes(vpc string) []cloud.Route {
	routes := []cloud.Route{}
	prefix := func(n int) netip.Prefix { return netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, byte(n), 0}), 24) }
	if t.rng.IntN(2) == 0 {
		routes = append(routes, cloud.Route{Destination: prefix(t.rng.IntN(4)), Target: cloud.RouteBlackhole})
	}
	if nat := t.pickIn(kindNAT, vpc); nat != nil {
		routes = append(routes, cloud.Route{Destination: prefix(4 + t.rng.IntN(4)), Target: cloud.RouteNAT, ID: nat.id})
	}
	return routes
}

// tableSubnets returns no subnet, or one of the tenant's subnets of a VPC.
func (t *tenantClient) tableSubnets(vpc string) []cloud.SubnetID {
	if s := t.pickIn(kindSubnet, vpc); s != nil {
		return []cloud.SubnetID{cloud.SubnetID(s.id)}
	}
	return []cloud.SubnetID{}
}

func (t *tenantClient) createTable(ctx context.Context) {
	vpc := t.pick(kindVPC)
	if vpc == nil || len(t.networks[kindTable]) >= mostResources[kindTable] {
		return
	}
	q := network.RouteTableRequest{
		Name: fmt.Sprintf("%s-%d", t.name, t.asks), VPC: cloud.VPCID(vpc.id),
		Subnets: t.tableSubnets(vpc.id), Routes: t.routes(vpc.id),
	}
	table, err, ok := askNetwork(ctx, t, "create a route table", func(
		ctx context.Context, p *process, body [32]byte,
	) (network.Result[cloud.RouteTable], error) {
		return p.networks.CreateRouteTable(ctx, tenant.Default, q, body)
	})
	if fault.Is(err, fault.AlreadyExists) {
		return // the subnet has another route table
	}
	t.created(kindTable, string(table.ID), vpc.id, err, ok)
}

// changeTable replaces the routes of a route table, and sometimes its subnets.
func (t *tenantClient) changeTable(ctx context.Context) {
	table := t.pick(kindTable)
	if table == nil {
		return
	}
	routes, subnets := t.routes(table.parent), t.tableSubnets(table.parent)
	q := network.RouteTableUpdate{ID: cloud.RouteTableID(table.id), Routes: &routes}
	if t.rng.IntN(2) == 0 {
		q.Subnets = &subnets
	}
	_, err, ok := askNetwork(ctx, t, "change a route table", func(
		ctx context.Context, p *process, body [32]byte,
	) (network.Result[cloud.RouteTable], error) {
		return p.networks.UpdateRouteTable(ctx, tenant.Default, q, body)
	})
	if ok && err == nil {
		t.f.count("route tables changed")
	}
	t.refused("change a route table", err, fault.AlreadyExists)
}

// forgetParts removes the resources that are deleted with a VPC from the tenant's lists.
func (t *tenantClient) forgetParts(vpc string) {
	for _, kind := range []resourceKind{kindNAT, kindTable} {
		kept := []networkResource{}
		for _, r := range t.networks[kind] {
			if r.parent != vpc {
				kept = append(kept, r)
			}
		}
		t.networks[kind] = kept
	}
}

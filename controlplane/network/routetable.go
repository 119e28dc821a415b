package network

import (
	"context"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var (
	// routeTables is the table of route tables, at net-route-table/<project>/<id>.
	routeTables = store.NewTable[cloud.RouteTable]("net-route-table")
	// tablesIn lists the route tables of a VPC, at route-table-in/<vpc>/<id>.
	tablesIn = store.NewTable[struct{}]("route-table-in")
	// tableOf has the route table of a subnet, at route-table-of/<subnet>.
	tableOf = store.NewTable[cloud.RouteTableID]("route-table-of")
	// routeTargets lists the route tables that have a route to a target, at route-target/<ID of the target>/<table>.
	routeTargets = store.NewTable[struct{}]("route-target")
)

// RouteTableRequest describes a route table to create.
type RouteTableRequest struct {
	Name, Description string
	VPC               cloud.VPCID
	Subnets           []cloud.SubnetID
	Routes            []cloud.Route
}

// CreateRouteTable creates a route table for subnets of a VPC. It returns AlreadyExists if a subnet has a table, and
// ResourceExhausted if the VPC has maxRouteTables.
func (s *Service) CreateRouteTable(
	ctx context.Context, t cloud.Tenant, q RouteTableRequest, body [32]byte,
) (Result[cloud.RouteTable], error) {
	if err := cloud.CheckUUID("vpc_id", string(q.VPC)); err != nil {
		return Result[cloud.RouteTable]{}, err
	}
	if err := cloud.CheckDescription(q.Description); err != nil {
		return Result[cloud.RouteTable]{}, err
	}
	return createTableCommand.Call(ctx, s.opts.Commands, change[RouteTableRequest]{t, body, q})
}

var createTableCommand = newCommand("network.routes.create", "CreateRouteTable", createTable)

// createTable implements CreateRouteTable in a transaction of the leader.
func createTable(tx *store.Tx, t cloud.Tenant, q RouteTableRequest) (table cloud.RouteTable, err error) {
	vpc, err := find(tx, vpcs, kindVPC, t, string(q.VPC))
	if err != nil {
		return table, err
	}
	if err := checkRoom(tx, tablesIn, vpc, kindTable, maxRouteTables); err != nil {
		return table, err
	}
	id, err := newID()
	if err != nil {
		return table, err
	}
	if err := claimName(tx, t.Project, kindTable, q.Name, id); err != nil {
		return table, err
	}
	table = cloud.RouteTable{
		ID: cloud.RouteTableID(id), Name: q.Name, Org: t.Org, Project: t.Project, Description: q.Description,
		VPC:    vpc.ID,
		Status: cloud.NetworkActive, CreatedAt: tx.Now(), UpdatedAt: tx.Now(),
	}
	if err := setSubnets(tx, t, &table, q.Subnets); err != nil {
		return table, err
	}
	if err := setRoutes(tx, t, vpc, &table, q.Routes); err != nil {
		return table, err
	}
	tablesIn.Put(tx, &struct{}{}, string(vpc.ID), id)
	routeTables.Put(tx, &table, string(t.Project), id)
	return table, nil
}

// setSubnets replaces the subnets that use a route table.
func setSubnets(tx *store.Tx, t cloud.Tenant, table *cloud.RouteTable, wanted []cloud.SubnetID) error {
	for _, id := range table.Subnets {
		tableOf.Delete(tx, string(id))
	}
	table.Subnets = wanted
	for _, id := range wanted {
		subnet, err := find(tx, subnets, kindSubnet, t, string(id))
		if err != nil {
			return err
		}
		if subnet.VPC != table.VPC {
			return fault.Invalid("subnet_ids", "%s belongs to another VPC", label(kindSubnet, subnet.Name, string(id))).With("constraint", "same_vpc")
		}
		other, err := tableOf.Get(tx, string(id))
		if err != nil {
			return err
		}
		if other != nil {
			text, err := labelOf(tx, t.Project, kindTable, string(*other))
			if err != nil {
				return err
			}
			return fault.New(fault.AlreadyExists, "%s has %s", label(kindSubnet, subnet.Name, string(id)), text).
				WithReason("ROUTE_TABLE_EXISTS").With("field", "subnet_ids")
		}
		tableOf.Put(tx, &table.ID, string(id))
	}
	return nil
}

// setRoutes replaces the routes of a route table after it has checked their targets.
func setRoutes(tx *store.Tx, t cloud.Tenant, vpc *cloud.VPC, table *cloud.RouteTable, wanted []cloud.Route) error {
	if err := cloud.CheckRoutes(vpc, wanted); err != nil {
		return err
	}
	forgetTargets(tx, table)
	table.Routes = wanted
	for _, r := range wanted {
		if err := checkRouteTarget(tx, t, vpc, r); err != nil {
			return err
		}
		if r.ID != "" {
			routeTargets.Put(tx, &struct{}{}, r.ID, string(table.ID))
		}
	}
	return nil
}

// forgetTargets deletes the records of the targets of a route table.
func forgetTargets(tx *store.Tx, table *cloud.RouteTable) {
	for _, r := range table.Routes {
		if r.ID != "" {
			routeTargets.Delete(tx, r.ID, string(table.ID))
		}
	}
}

// checkRouteTarget returns an error unless the target of a route exists and can forward packets of the VPC.
func checkRouteTarget(tx *store.Tx, t cloud.Tenant, vpc *cloud.VPC, r cloud.Route) error {
	var at cloud.VPCID
	switch r.Target {
	case cloud.RoutePort:
		p, err := find(tx, ports, kindPort, t, r.ID)
		if err != nil {
			return err
		}
		if p.Secured {
			return fault.Invalid("routes", "%s cannot be a target: it has port security, which drops packets of other addresses",
				label(kindPort, p.Name, r.ID)).
				With("constraint", "port_security")
		}
		at = p.VPC
	case cloud.RouteNAT:
		if r.Destination.Addr().Is6() {
			return fault.Invalid("routes", "the route for %s leads to a NAT gateway, but NAT gateways translate IPv4 only", r.Destination).
				With("constraint", "ipv4")
		}
		n, err := find(tx, natGateways, kindNAT, t, r.ID)
		if err != nil {
			return err
		}
		at = n.VPC
	case cloud.RoutePeering:
		p, err := findPeering(tx, t, cloud.PeeringID(r.ID))
		if err != nil {
			return err
		}
		if p.VPC != vpc.ID && p.PeerVPC != vpc.ID {
			return fault.Invalid("routes", "%s does not connect this VPC", label(kindPeering, p.Name, r.ID)).With("constraint", "same_vpc")
		}
		return nil
	default:
		return nil
	}
	if at != vpc.ID {
		return fault.Invalid("routes", "the target %s belongs to another VPC", r.ID).With("constraint", "same_vpc")
	}
	return nil
}

// routesTo returns the labels of up to maxNamedUsers+1 route tables of a project with a route to a target.
func routesTo(r store.Reader, p cloud.ProjectID, target string) ([]string, error) {
	return listUsers(r, routeTargets, p, target, "a route of ", kindTable)
}

// GetRouteTable returns a route table of the project, or NotFound.
func (s *Service) GetRouteTable(ctx context.Context, t cloud.Tenant, id cloud.RouteTableID) (*cloud.RouteTable, error) {
	return get(ctx, s, routeTables, kindTable, "id", t, string(id))
}

// ListRouteTables returns a page of the project's route tables, and the token of the next page. An empty vpc means all.
func (s *Service) ListRouteTables(
	ctx context.Context, t cloud.Tenant, p page, vpc cloud.VPCID,
) ([]*cloud.RouteTable, string, error) {
	return listIn(ctx, s, listing[cloud.RouteTable]{
		kind: kindTable, table: routeTables, t: t, page: p, name: func(r *cloud.RouteTable) string { return r.Name },
		keep: func(r *cloud.RouteTable) bool { return vpc == "" || r.VPC == vpc },
	}, tablesIn, vpc)
}

// RouteTableUpdate describes a change of a route table. Nil fields keep their value.
type RouteTableUpdate struct {
	ID                cloud.RouteTableID
	Name, Description *string
	Subnets           *[]cloud.SubnetID
	Routes            *[]cloud.Route
}

// UpdateRouteTable changes a route table. It replaces subnets and routes as a whole.
func (s *Service) UpdateRouteTable(
	ctx context.Context, t cloud.Tenant, q RouteTableUpdate, body [32]byte,
) (Result[cloud.RouteTable], error) {
	if err := cloud.CheckUUID("id", string(q.ID)); err != nil {
		return Result[cloud.RouteTable]{}, err
	}
	return updateTableCommand.Call(ctx, s.opts.Commands, change[RouteTableUpdate]{t, body, q})
}

var updateTableCommand = newCommand("network.routes.update", "UpdateRouteTable", updateTable)

// updateTable implements UpdateRouteTable in a transaction of the leader.
func updateTable(tx *store.Tx, t cloud.Tenant, q RouteTableUpdate) (cloud.RouteTable, error) {
	table, err := find(tx, routeTables, kindTable, t, string(q.ID))
	if err != nil {
		return cloud.RouteTable{}, err
	}
	if err := describe(tx, t.Project, kindTable, string(table.ID), &table.Name, &table.Description, q.Name, q.Description); err != nil {
		return cloud.RouteTable{}, err
	}
	if q.Subnets != nil {
		if err := setSubnets(tx, t, table, *q.Subnets); err != nil {
			return cloud.RouteTable{}, err
		}
	}
	if q.Routes != nil {
		vpc, err := find(tx, vpcs, kindVPC, t, string(table.VPC))
		if err != nil {
			return cloud.RouteTable{}, err
		}
		if err := setRoutes(tx, t, vpc, table, *q.Routes); err != nil {
			return cloud.RouteTable{}, err
		}
	}
	table.UpdatedAt = tx.Now()
	routeTables.Put(tx, table, string(t.Project), string(table.ID))
	return *table, nil
}

// DeleteRouteTable deletes a route table. Its subnets then use the VPC's default routes.
func (s *Service) DeleteRouteTable(
	ctx context.Context, t cloud.Tenant, id cloud.RouteTableID, body [32]byte,
) (Result[struct{}], error) {
	if err := cloud.CheckUUID("id", string(id)); err != nil {
		return Result[struct{}]{}, err
	}
	return deleteTableCommand.Call(ctx, s.opts.Commands, change[cloud.RouteTableID]{t, body, id})
}

var deleteTableCommand = newCommand("network.routes.delete", "DeleteRouteTable", deleteTable)

// deleteTable implements DeleteRouteTable in a transaction of the leader.
func deleteTable(tx *store.Tx, t cloud.Tenant, id cloud.RouteTableID) (none struct{}, err error) {
	table, err := find(tx, routeTables, kindTable, t, string(id))
	if err != nil {
		return none, err
	}
	removeTable(tx, table)
	return none, nil
}

// removeTable deletes the records of a route table.
func removeTable(tx *store.Tx, table *cloud.RouteTable) {
	for _, id := range table.Subnets {
		tableOf.Delete(tx, string(id))
	}
	forgetTargets(tx, table)
	releaseName(tx, table.Project, kindTable, table.Name)
	tablesIn.Delete(tx, string(table.VPC), string(table.ID))
	routeTables.Delete(tx, string(table.Project), string(table.ID))
}

// leaveTable removes a subnet from its route table.
func leaveTable(tx *store.Tx, t cloud.Tenant, subnet cloud.SubnetID) error {
	id, err := tableOf.Get(tx, string(subnet))
	if err != nil || id == nil {
		return err
	}
	table, err := find(tx, routeTables, kindTable, t, string(*id))
	if err != nil {
		return err
	}
	table.Subnets = slices.DeleteFunc(table.Subnets, func(s cloud.SubnetID) bool { return s == subnet })
	table.UpdatedAt = tx.Now()
	tableOf.Delete(tx, string(subnet))
	routeTables.Put(tx, table, string(t.Project), string(table.ID))
	return nil
}

package network

import (
	"context"
	"maps"
	"net/netip"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var (
	// ports is the table of ports, at net-port/<project>/<id>.
	ports = store.NewTable[cloud.Port]("net-port")
	// portsOf lists the ports of a subnet, at port-of/<subnet>/<port>.
	portsOf = store.NewTable[struct{}]("port-of")
	// portAt has the port of each address of a VPC, IPv4 and IPv6, at port-at/<vpc>/<address>.
	portAt = store.NewTable[cloud.PortID]("port-at")
	// devicePorts lists the ports of a device, at device-port/<device>/<port>.
	devicePorts = store.NewTable[struct{}]("device-port")
	// macs has the port of each MAC address of a VPC, at port-mac/<vpc>/<address>.
	macs = store.NewTable[cloud.PortID]("port-mac")
)

// PortRequest describes a port to create. The zero values of MAC, IP and IP6 let the service choose.
type PortRequest struct {
	Name, Description string
	Subnet            cloud.SubnetID
	MAC               cloud.MAC
	IP, IP6           netip.Addr
	// Groups is nil for the group "default"; an empty list is for no group.
	Groups  *[]cloud.SecurityGroupID
	Pairs   []cloud.AddressPair
	Secured bool
	Mbps    uint32
	Labels  map[string]string `cbor:",omitempty"`
}

// CreatePort creates a port. It returns ResourceExhausted if no address is free, and AlreadyExists if the requested
// address or MAC is in use.
func (s *Service) CreatePort(
	ctx context.Context, t cloud.Tenant, q PortRequest, body [32]byte,
) (Result[cloud.Port], error) {
	if err := q.check(); err != nil {
		return Result[cloud.Port]{}, err
	}
	return createPortCommand.Call(ctx, s.opts.Commands, change[PortRequest]{t, body, q})
}

func (q *PortRequest) check() error {
	if err := cloud.CheckUUID("subnet_id", string(q.Subnet)); err != nil {
		return err
	}
	if q.Groups != nil {
		if err := checkGroupIDs(*q.Groups); err != nil {
			return err
		}
	}
	if err := checkPairs(q.Pairs); err != nil {
		return err
	}
	if err := cloud.CheckPortLabels("labels", q.Labels); err != nil {
		return err
	}
	return cloud.CheckDescription(q.Description)
}

// checkGroupIDs returns InvalidArgument unless ids are up to MaxSecurityGroups different UUIDs.
func checkGroupIDs(ids []cloud.SecurityGroupID) error {
	if len(ids) > cloud.MaxSecurityGroups {
		return fault.Invalid("security_groups", "must be at most %d, got %d", cloud.MaxSecurityGroups, len(ids)).
			With("constraint", "max_items")
	}
	seen := map[cloud.SecurityGroupID]bool{}
	for _, id := range ids {
		if err := cloud.CheckUUID("security_groups", string(id)); err != nil {
			return err
		}
		if seen[id] {
			return fault.Invalid("security_groups", "has %s twice", id).With("constraint", "unique")
		}
		seen[id] = true
	}
	return nil
}

func checkPairs(pairs []cloud.AddressPair) error {
	if len(pairs) > cloud.MaxAddressPairs {
		return fault.Invalid("allowed_address_pairs", "must be at most %d, got %d", cloud.MaxAddressPairs, len(pairs)).
			With("constraint", "max_items")
	}
	return nil
}

var createPortCommand = newCommand("network.port.create", "CreatePort", createPort)

// createPort implements CreatePort in a transaction of the leader.
func createPort(tx *store.Tx, t cloud.Tenant, q PortRequest) (port cloud.Port, err error) {
	subnet, err := find(tx, subnets, kindSubnet, t, string(q.Subnet))
	if err != nil {
		return port, err
	}
	if err := chargeQuota(tx, t, quantity{Ports: 1}); err != nil {
		return port, err
	}
	id, err := newID()
	if err != nil {
		return port, err
	}
	if err := claimName(tx, t.Project, kindPort, q.Name, id); err != nil {
		return port, err
	}
	port = cloud.Port{
		ID: cloud.PortID(id), Name: q.Name, Org: t.Org, Project: t.Project, Description: q.Description,
		VPC: subnet.VPC, Subnet: subnet.ID, MAC: q.MAC, IP: q.IP, IP6: q.IP6, Pairs: q.Pairs, Secured: q.Secured,
		Mbps:   q.Mbps,
		Labels: q.Labels, Status: cloud.NetworkDown, CreatedAt: tx.Now(), UpdatedAt: tx.Now(),
	}
	if port.Groups, err = chooseGroups(tx, t, q.Groups); err != nil {
		return port, err
	}
	if err := claimAddresses(tx, subnet, &port); err != nil {
		return port, err
	}
	useGroups(tx, port.ID, port.Groups)
	indexLabels(tx, &port)
	for _, a := range addressesOfPort(&port) {
		portAt.Put(tx, &port.ID, string(port.VPC), a.String())
	}
	portsOf.Put(tx, &struct{}{}, string(subnet.ID), id)
	ports.Put(tx, &port, string(t.Project), id)
	return port, nil
}

// setDevice records which device uses a port.
func setDevice(tx *store.Tx, p *cloud.Port, d cloud.PortDevice) {
	p.Device = d
	devicePorts.Put(tx, &struct{}{}, d.ID, string(p.ID))
	ports.Put(tx, p, string(p.Project), string(p.ID))
}

// GetPort returns a port of the project, or NotFound.
func (s *Service) GetPort(ctx context.Context, t cloud.Tenant, id cloud.PortID) (*cloud.Port, error) {
	return get(ctx, s, ports, kindPort, "id", t, string(id))
}

// PortFilter selects ports. Empty fields select all.
type PortFilter struct {
	VPC    cloud.VPCID
	Subnet cloud.SubnetID
	Device string
	Group  cloud.SecurityGroupID
}

// ListPorts returns a page of the project's ports, and the token of the next page.
func (s *Service) ListPorts(ctx context.Context, t cloud.Tenant, p page, f PortFilter) ([]*cloud.Port, string, error) {
	l := listing[cloud.Port]{
		kind: kindPort, table: ports, t: t, page: p, name: func(n *cloud.Port) string { return n.Name },
		filter: string(f.VPC) + "\x00" + string(f.Subnet) + "\x00" + f.Device + "\x00" + string(f.Group),
		keep: func(n *cloud.Port) bool {
			return (f.VPC == "" || n.VPC == f.VPC) && (f.Subnet == "" || n.Subnet == f.Subnet) &&
				(f.Device == "" || n.Device.ID == f.Device) && (f.Group == "" || hasGroup(n, f.Group))
		},
	}
	// Prefer the index with the fewest entries.
	switch {
	case p.Name != "":
		return listNamed(ctx, s, l)
	case f.Device != "":
		return listOf(ctx, s, l, devicePorts, f.Device)
	case f.Group != "":
		return listOf(ctx, s, l, groupPorts, string(f.Group))
	case f.Subnet != "":
		return listOf(ctx, s, l, portsOf, string(f.Subnet))
	}
	return list(ctx, s, l)
}

// ListAllPorts returns a page of the ports within t, of all projects for the zero t, and the token of the next page.
func (s *Service) ListAllPorts(ctx context.Context, t cloud.Tenant, p page) ([]*cloud.Port, string, error) {
	return listAll(ctx, s, listing[cloud.Port]{table: ports, t: t, page: p},
		func(n *cloud.Port) cloud.Tenant { return cloud.Tenant{Org: n.Org, Project: n.Project} })
}

// PortUpdate describes a change of a port. Nil fields keep their value.
type PortUpdate struct {
	ID                cloud.PortID
	Name, Description *string
	Groups            *[]cloud.SecurityGroupID
	Pairs             *[]cloud.AddressPair
	Secured           *bool
	Mbps              *uint32
	Labels            *map[string]string `cbor:",omitempty"`
}

// UpdatePort changes a port.
func (s *Service) UpdatePort(
	ctx context.Context, t cloud.Tenant, q PortUpdate, body [32]byte,
) (Result[cloud.Port], error) {
	if err := q.check(); err != nil {
		return Result[cloud.Port]{}, err
	}
	return updatePortCommand.Call(ctx, s.opts.Commands, change[PortUpdate]{t, body, q})
}

func (q *PortUpdate) check() error {
	if err := cloud.CheckUUID("id", string(q.ID)); err != nil {
		return err
	}
	if q.Groups != nil {
		if err := checkGroupIDs(*q.Groups); err != nil {
			return err
		}
	}
	if q.Labels != nil {
		if err := cloud.CheckPortLabels("labels", *q.Labels); err != nil {
			return err
		}
	}
	if q.Pairs != nil {
		return checkPairs(*q.Pairs)
	}
	return nil
}

var updatePortCommand = newCommand("network.port.update", "UpdatePort", updatePort)

// updatePort implements UpdatePort in a transaction of the leader.
func updatePort(tx *store.Tx, t cloud.Tenant, q PortUpdate) (cloud.Port, error) {
	port, err := find(tx, ports, kindPort, t, string(q.ID))
	if err != nil {
		return cloud.Port{}, err
	}
	if err := describe(
		tx, t.Project, kindPort, string(port.ID), &port.Name, &port.Description, q.Name, q.Description,
	); err != nil {
		return cloud.Port{}, err
	}
	if q.Groups != nil {
		if err := checkGroupsExist(tx, t, *q.Groups); err != nil {
			return cloud.Port{}, err
		}
		leaveGroups(tx, port.ID, port.Groups)
		useGroups(tx, port.ID, *q.Groups)
		port.Groups = *q.Groups
	}
	if q.Pairs != nil {
		port.Pairs = *q.Pairs
	}
	if q.Secured != nil {
		if *q.Secured {
			routes, err := routesTo(tx, port.Project, string(port.ID))
			if err != nil {
				return cloud.Port{}, err
			}
			if len(routes) > 0 {
				return cloud.Port{}, inUse("port security cannot be on: "+label(kindPort, port.Name, string(port.ID)), routes)
			}
		}
		port.Secured = *q.Secured
	}
	if q.Mbps != nil {
		port.Mbps = *q.Mbps
	}
	if q.Labels != nil && !maps.Equal(port.Labels, *q.Labels) {
		if err := relabel(tx, port, *q.Labels); err != nil {
			return cloud.Port{}, err
		}
	}
	port.UpdatedAt = tx.Now()
	ports.Put(tx, port, string(t.Project), string(port.ID))
	return *port, nil
}

// DeletePort deletes a port that no device uses.
func (s *Service) DeletePort(
	ctx context.Context, t cloud.Tenant, id cloud.PortID, body [32]byte,
) (Result[struct{}], error) {
	if err := cloud.CheckUUID("id", string(id)); err != nil {
		return Result[struct{}]{}, err
	}
	return deletePortCommand.Call(ctx, s.opts.Commands, change[cloud.PortID]{t, body, id})
}

var deletePortCommand = newCommand("network.port.delete", "DeletePort", deletePort)

// deletePort implements DeletePort in a transaction of the leader.
func deletePort(tx *store.Tx, t cloud.Tenant, id cloud.PortID) (none struct{}, err error) {
	port, err := find(tx, ports, kindPort, t, string(id))
	if err != nil {
		return none, err
	}
	users, err := portUsers(tx, port)
	if err != nil {
		return none, err
	}
	if len(users) > 0 {
		return none, inUse(label(kindPort, port.Name, string(id)), users)
	}
	return none, removePort(tx, t, port)
}

// portUsers returns the labels of the device of a port, and of what leads to the port.
func portUsers(r store.Reader, port *cloud.Port) ([]string, error) {
	users, err := portReferrers(r, port)
	if err != nil || port.Device.ID == "" {
		return users, err
	}
	device, err := labelDevice(r, port)
	return append([]string{device}, users...), err
}

// portReferrers returns the labels of the floating IP, the routes and the service IPs that lead to a port.
func portReferrers(r store.Reader, port *cloud.Port) (users []string, err error) {
	floating, err := floatingAt.Get(r, string(port.ID))
	if err != nil {
		return nil, err
	}
	if floating != nil {
		text, err := labelOf(r, port.Project, kindFloating, string(*floating))
		if err != nil {
			return nil, err
		}
		users = append(users, text)
	}
	routes, err := routesTo(r, port.Project, string(port.ID))
	if err != nil {
		return nil, err
	}
	services, err := listUsers(r, backendsOf, port.Project, string(port.ID), "", kindService)
	return slices.Concat(users, routes, services), err
}

// removePort deletes the records of a port and releases what it has.
func removePort(tx *store.Tx, t cloud.Tenant, port *cloud.Port) error {
	subnet, err := find(tx, subnets, kindSubnet, t, string(port.Subnet))
	if err != nil {
		return err
	}
	spaceOf(subnet).release(tx, port.IP)
	if port.IP6.IsValid() {
		release6(tx, subnet, port.IP6)
	}
	for _, a := range addressesOfPort(port) {
		portAt.Delete(tx, string(port.VPC), a.String())
	}
	if port.Device.ID != "" {
		devicePorts.Delete(tx, port.Device.ID, string(port.ID))
	}
	macs.Delete(tx, string(port.VPC), port.MAC.String())
	leaveGroups(tx, port.ID, port.Groups)
	forgetLabels(tx, port)
	releaseName(tx, t.Project, kindPort, port.Name)
	portsOf.Delete(tx, string(subnet.ID), string(port.ID))
	ports.Delete(tx, string(t.Project), string(port.ID))
	return returnQuota(tx, t, quantity{Ports: 1})
}

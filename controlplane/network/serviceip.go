package network

import (
	"context"
	"net/netip"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var (
	// serviceIPs is the table of service IPs, at net-service-ip/<project>/<id>.
	serviceIPs = store.NewTable[cloud.ServiceIP]("net-service-ip")
	// servicesIn lists the service IPs of a VPC, at service-ip-in/<vpc>/<id>.
	servicesIn = store.NewTable[struct{}]("service-ip-in")
	// backendsOf lists the service IPs that have a port as backend, at backend-of/<port>/<service IP>.
	backendsOf = store.NewTable[struct{}]("backend-of")
)

// ServiceRequest describes a service IP to create. Service has its VPC, ports, backends or selector, health check and
// affinity.
type ServiceRequest struct {
	// Subnet is the subnet of the address. It is empty for an address of the VPC's ServiceCIDR.
	Subnet  cloud.SubnetID
	Address netip.Addr // invalid for the lowest free address
	Service cloud.ServiceIP
}

// CreateServiceIP creates a service IP. A port of the subnet holds the address, unless it is one of the VPC's
// ServiceCIDR.
func (s *Service) CreateServiceIP(
	ctx context.Context, t cloud.Tenant, q ServiceRequest, body [32]byte,
) (Result[cloud.ServiceIP], error) {
	field, id := "subnet_id", string(q.Subnet)
	if id == "" && q.Service.VPC != "" {
		field, id = "vpc_id", string(q.Service.VPC)
	}
	if err := cloud.CheckUUID(field, id); err != nil {
		return Result[cloud.ServiceIP]{}, err
	}
	if err := q.Service.Check(); err != nil {
		return Result[cloud.ServiceIP]{}, err
	}
	return createServiceCommand.Call(ctx, s.opts.Commands, change[ServiceRequest]{t, body, q})
}

var createServiceCommand = newCommand("network.service.create", "CreateServiceIp", createService)

// createService implements CreateServiceIP in a transaction of the leader.
func createService(tx *store.Tx, t cloud.Tenant, q ServiceRequest) (out cloud.ServiceIP, err error) {
	if err := chargeQuota(tx, t, quantity{ServiceIPs: 1}); err != nil {
		return out, err
	}
	id, err := newID()
	if err != nil {
		return out, err
	}
	out = q.Service
	out.ID, out.Org, out.Project = cloud.ServiceIPID(id), t.Org, t.Project
	if err := claimName(tx, t.Project, kindService, out.Name, id); err != nil {
		return out, err
	}
	if q.Subnet == "" {
		err = claimServiceAddress(tx, t, &out, q.Address)
	} else {
		err = createServicePort(tx, t, &out, q)
	}
	if err != nil {
		return out, err
	}
	out.CreatedAt, out.UpdatedAt = tx.Now(), tx.Now()
	carryHealth(&out, nil)
	if err := setBackends(tx, t, &out, nil); err != nil {
		return out, err
	}
	servicesIn.Put(tx, &struct{}{}, string(out.VPC), id)
	if len(out.Selector) > 0 {
		selectorsIn.Put(tx, &struct{}{}, string(out.VPC), id)
	}
	serviceIPs.Put(tx, &out, string(t.Project), id)
	err = resolveBackends(tx.Unguarded(), &out)
	return out, err
}

// createServicePort creates the port that holds the address of a service IP in a subnet.
func createServicePort(tx *store.Tx, t cloud.Tenant, s *cloud.ServiceIP, q ServiceRequest) error {
	port, err := createPort(
		tx, t, PortRequest{Subnet: q.Subnet, IP: q.Address, Groups: &[]cloud.SecurityGroupID{}, Secured: true},
	)
	if err != nil {
		return err
	}
	if s.VPC != "" && s.VPC != port.VPC {
		if _, err := find(tx, vpcs, kindVPC, t, string(s.VPC)); err != nil {
			return err
		}
		return fault.Invalid("subnet_id", "is a subnet of another VPC than vpc_id names; leave out vpc_id or choose a subnet of it").With("constraint", "same_vpc")
	}
	setDevice(tx, &port, cloud.PortDevice{Kind: cloud.DeviceServiceIP, ID: string(s.ID)})
	s.VPC, s.Subnet, s.Port, s.Address = port.VPC, port.Subnet, port.ID, port.IP
	return nil
}

// setBackends checks the backends of a service IP and records which ports they use. former are the backends that it had
// before.
func setBackends(tx *store.Tx, t cloud.Tenant, s *cloud.ServiceIP, former []cloud.Backend) error {
	for _, b := range former {
		if b.Port != "" {
			backendsOf.Delete(tx, string(b.Port), string(s.ID))
		}
	}
	for _, b := range s.Backends {
		if b.Port == "" {
			if err := checkBackendAddress(tx, t, s.VPC, b.Address); err != nil {
				return err
			}
			continue
		}
		p, err := find(tx, ports, kindPort, t, string(b.Port))
		if err != nil {
			return err
		}
		if p.VPC != s.VPC || p.ID == s.Port {
			return fault.Invalid("backends.port_id", "%s is not another port of the VPC", label(kindPort, p.Name, string(b.Port))).With("constraint", "same_vpc")
		}
		backendsOf.Put(tx, &struct{}{}, string(b.Port), string(s.ID))
	}
	return nil
}

// checkBackendAddress returns InvalidArgument unless an address is in the VPC or in a VPC that is peered with it. A
// host would otherwise send connections and health checks of a tenant to the hosts' own network.
func checkBackendAddress(r store.Reader, t cloud.Tenant, id cloud.VPCID, a netip.Addr) error {
	vpc, err := find(r, vpcs, kindVPC, t, string(id))
	if err != nil || a.Is4() && vpc.Contains(a) {
		return err
	}
	if !a.Is4() {
		return fault.Invalid("backends.address", "must be an IPv4 address, as that of the service IP is, got %s", a).
			With("constraint", "ipv4")
	}
	connected, _, err := peeringsOf.List(r, 0, string(id))
	if err != nil {
		return err
	}
	for _, u := range connected {
		p, err := findPeering(r, t, cloud.PeeringID(u.Path[1]))
		if err != nil {
			return err
		}
		other, project := p.PeerVPC, p.PeerProject
		if other == id {
			other, project = p.VPC, p.Project
		}
		peer, err := vpcs.Get(r, string(project), string(other))
		if err != nil {
			return err
		}
		if p.Status == cloud.NetworkActive && peer != nil && peer.Contains(a) {
			return nil
		}
	}
	return fault.Invalid("backends.address", "must be in %s or in a VPC that is peered with it, got %s", label(kindVPC, vpc.Name, string(id)), a).
		With("constraint", "within_vpc")
}

// removePeerBackends is called when a peering ends. It removes backends from the service IPs of the VPC with this ID:
// those that are addresses of the other VPC of the peering. Without the peering, checkBackendAddress no longer permits
// these addresses. Connections to them would leave the VPC, or would reach another VPC with the same prefix if the VPC
// is peered with it later.
func removePeerBackends(tx *store.Tx, p *cloud.Peering, id cloud.VPCID) error {
	project := p.Project
	if id != p.VPC {
		project = p.PeerProject
	}
	other, err := otherVPC(tx, p, id)
	if err != nil || other == nil {
		return err
	}
	all, _, err := servicesIn.List(tx, 0, string(id))
	if err != nil {
		return err
	}
	for _, u := range all {
		s, err := serviceIPs.Get(tx, string(project), u.Path[1])
		if err != nil {
			return err
		}
		if s == nil {
			continue
		}
		inPeer := func(b cloud.Backend) bool { return b.Port == "" && other.Contains(b.Address) }
		if !slices.ContainsFunc(s.Backends, inPeer) {
			continue
		}
		s.Backends = slices.DeleteFunc(s.Backends, inPeer)
		setServiceStatus(s)
		s.UpdatedAt = tx.Now()
		serviceIPs.Put(tx, s, string(project), string(s.ID))
	}
	return nil
}

// GetServiceIP returns a service IP of the project, or NotFound.
func (s *Service) GetServiceIP(
	ctx context.Context, t cloud.Tenant, id cloud.ServiceIPID,
) (out *cloud.ServiceIP, err error) {
	if err := cloud.CheckUUID("id", string(id)); err != nil {
		return nil, err
	}
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		if out, err = find(v, serviceIPs, kindService, t, string(id)); err != nil {
			return err
		}
		return resolveBackends(v, out)
	})
	return out, err
}

// ListServiceIPs returns a page of the project's service IPs, and the token of the next page. An empty vpc means all.
func (s *Service) ListServiceIPs(
	ctx context.Context, t cloud.Tenant, p page, vpc cloud.VPCID,
) ([]*cloud.ServiceIP, string, error) {
	return listIn(ctx, s, listing[cloud.ServiceIP]{
		kind: kindService, table: serviceIPs, t: t, page: p, name: func(n *cloud.ServiceIP) string { return n.Name },
		keep: func(n *cloud.ServiceIP) bool { return vpc == "" || n.VPC == vpc }, complete: resolveBackends,
	}, servicesIn, vpc)
}

// ServiceUpdate describes a change of a service IP. Nil names and descriptions keep their value. The ports, backends,
// selector, health check and affinity of Service replace the former ones.
type ServiceUpdate struct {
	ID                cloud.ServiceIPID
	Name, Description *string
	Service           cloud.ServiceIP
}

// UpdateServiceIP changes a service IP.
func (s *Service) UpdateServiceIP(
	ctx context.Context, t cloud.Tenant, q ServiceUpdate, body [32]byte,
) (Result[cloud.ServiceIP], error) {
	if err := cloud.CheckUUID("id", string(q.ID)); err != nil {
		return Result[cloud.ServiceIP]{}, err
	}
	if err := q.Service.Check(); err != nil {
		return Result[cloud.ServiceIP]{}, err
	}
	return updateServiceCommand.Call(ctx, s.opts.Commands, change[ServiceUpdate]{t, body, q})
}

var updateServiceCommand = newCommand("network.service.update", "UpdateServiceIp", updateService)

// updateService implements UpdateServiceIP in a transaction of the leader.
func updateService(tx *store.Tx, t cloud.Tenant, q ServiceUpdate) (cloud.ServiceIP, error) {
	s, err := find(tx, serviceIPs, kindService, t, string(q.ID))
	if err != nil {
		return cloud.ServiceIP{}, err
	}
	if err := describe(tx, t.Project, kindService, string(s.ID), &s.Name, &s.Description, q.Name, q.Description); err != nil {
		return cloud.ServiceIP{}, err
	}
	former := *s
	s.Ports, s.Backends, s.Health, s.Affinity = q.Service.Ports, q.Service.Backends, q.Service.Health, q.Service.Affinity
	s.Selector = q.Service.Selector
	carryHealth(s, &former)
	if err := setBackends(tx, t, s, former.Backends); err != nil {
		return cloud.ServiceIP{}, err
	}
	selectorsIn.Delete(tx, string(s.VPC), string(s.ID))
	if len(s.Selector) > 0 {
		selectorsIn.Put(tx, &struct{}{}, string(s.VPC), string(s.ID))
	}
	s.UpdatedAt = tx.Now()
	serviceIPs.Put(tx, s, string(t.Project), string(s.ID))
	err = resolveBackends(tx.Unguarded(), s)
	return *s, err
}

// DeleteServiceIP deletes a service IP and its port. Neither may have a floating IP, or be the target of a route or the
// backend of another service IP.
func (s *Service) DeleteServiceIP(
	ctx context.Context, t cloud.Tenant, id cloud.ServiceIPID, body [32]byte,
) (Result[struct{}], error) {
	if err := cloud.CheckUUID("id", string(id)); err != nil {
		return Result[struct{}]{}, err
	}
	return deleteServiceCommand.Call(ctx, s.opts.Commands, change[cloud.ServiceIPID]{t, body, id})
}

var deleteServiceCommand = newCommand("network.service.delete", "DeleteServiceIp", deleteService)

// deleteService implements DeleteServiceIP in a transaction of the leader.
func deleteService(tx *store.Tx, t cloud.Tenant, id cloud.ServiceIPID) (none struct{}, err error) {
	s, err := find(tx, serviceIPs, kindService, t, string(id))
	if err != nil {
		return none, err
	}
	var port *cloud.Port
	if s.Port != "" {
		if port, err = find(tx, ports, kindPort, t, string(s.Port)); err != nil {
			return none, err
		}
	}
	users, err := serviceUsers(tx, s, port)
	if err != nil {
		return none, err
	}
	if len(users) > 0 {
		return none, inUse(label(kindService, s.Name, string(id)), users)
	}
	if port == nil {
		err = releaseServiceAddress(tx, s)
	} else {
		err = removePort(tx, t, port)
	}
	if err != nil {
		return none, err
	}
	former := s.Backends
	s.Backends = nil
	if err := setBackends(tx, t, s, former); err != nil {
		return none, err
	}
	servicesIn.Delete(tx, string(s.VPC), string(id))
	selectorsIn.Delete(tx, string(s.VPC), string(id))
	releaseName(tx, t.Project, kindService, s.Name)
	serviceIPs.Delete(tx, string(t.Project), string(id))
	return none, returnQuota(tx, t, quantity{ServiceIPs: 1})
}

// serviceUsers returns the labels of the resources that refer to a service IP or to its port. port is nil if the
// service IP has no port.
func serviceUsers(r store.Reader, s *cloud.ServiceIP, port *cloud.Port) (users []string, err error) {
	if port != nil {
		if users, err = portReferrers(r, port); err != nil {
			return nil, err
		}
	}
	floating, err := floatingAt.Get(r, string(s.ID))
	if err != nil || floating == nil {
		return users, err
	}
	text, err := labelOf(r, s.Project, kindFloating, string(*floating))
	return append([]string{text}, users...), err
}

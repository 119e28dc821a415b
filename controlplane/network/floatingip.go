package network

import (
	"cmp"
	"context"
	"net/netip"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

var (
	// floatingIPs is the table of floating IPs, at net-floating-ip/<project>/<id>.
	floatingIPs = store.NewTable[cloud.FloatingIP]("net-floating-ip")
	// floatingAt has the floating IP of a port or a service IP, at floating-at/<ID of the target>.
	floatingAt = store.NewTable[cloud.FloatingIPID]("floating-at")
)

// FloatingRequest describes a floating IP to create. At most one of Port and ServiceIP is set.
type FloatingRequest struct {
	Name, Description string
	External          string // empty for the only external network
	Address           netip.Addr
	Port              cloud.PortID
	ServiceIP         cloud.ServiceIPID
}

// CreateFloatingIP gives the project an address of an external network. It returns ResourceExhausted if none is free.
func (s *Service) CreateFloatingIP(ctx context.Context, t cloud.Tenant, q FloatingRequest, body [32]byte) (Result[cloud.FloatingIP], error) {
	if err := checkTarget(q.Port, q.ServiceIP); err != nil {
		return Result[cloud.FloatingIP]{}, err
	}
	if err := cloud.CheckDescription(q.Description); err != nil {
		return Result[cloud.FloatingIP]{}, err
	}
	return createFloatingCommand.Call(ctx, s.opts.Commands, change[FloatingRequest]{t, body, q})
}

// checkTarget checks the IDs of a floating IP's target.
func checkTarget(port cloud.PortID, service cloud.ServiceIPID) error {
	switch {
	case port != "" && service != "":
		return fault.Invalid("service_ip_id", "must be empty if port_id is set").With("constraint", "exclusive")
	case port != "":
		return cloud.CheckUUID("port_id", string(port))
	case service != "":
		return cloud.CheckUUID("service_ip_id", string(service))
	}
	return nil
}

var createFloatingCommand = newCommand("network.floating.create", "CreateFloatingIp", createFloating)

// createFloating implements CreateFloatingIP in a transaction of the leader.
func createFloating(tx *store.Tx, t cloud.Tenant, q FloatingRequest) (f cloud.FloatingIP, err error) {
	external, err := findExternal(tx, q.External)
	if err != nil {
		return f, err
	}
	if err := chargeQuota(tx, t, quantity{FloatingIPs: 1}); err != nil {
		return f, err
	}
	id, err := newID()
	if err != nil {
		return f, err
	}
	if err := claimName(tx, t.Project, kindFloating, q.Name, id); err != nil {
		return f, err
	}
	f = cloud.FloatingIP{
		ID: cloud.FloatingIPID(id), Name: q.Name, Org: t.Org, Project: t.Project, Description: q.Description, External: external.Name,
		Status: cloud.NetworkDown, CreatedAt: tx.Now(), UpdatedAt: tx.Now(),
	}
	if f.Address, err = assignExternal(tx, external, q.Address, "floating IP "+id); err != nil {
		return f, err
	}
	if err := attachFloating(tx, t, &f, q.Port, q.ServiceIP); err != nil {
		return f, err
	}
	floatingIPs.Put(tx, &f, string(t.Project), id)
	return f, nil
}

// attachFloating sets the target of a floating IP without one. It returns FailedPrecondition if another floating IP
// leads to the target.
func attachFloating(tx *store.Tx, t cloud.Tenant, f *cloud.FloatingIP, port cloud.PortID, service cloud.ServiceIPID) error {
	var target, what string
	var node cloud.NodeID
	var vpc cloud.VPCID
	switch {
	case port != "":
		p, err := find(tx, ports, kindPort, t, string(port))
		if err != nil {
			return err
		}
		f.Fixed, node, target, what = p.IP, p.Node, string(port), label(kindPort, p.Name, string(port))
	case service != "":
		s, err := find(tx, serviceIPs, kindService, t, string(service))
		if err != nil {
			return err
		}
		f.Fixed, vpc, target, what = s.Address, s.VPC, string(service), label(kindService, s.Name, string(service))
	default:
		return nil
	}
	other, err := floatingAt.Get(tx, target)
	if err != nil {
		return err
	}
	if other != nil {
		user, err := labelOf(tx, t.Project, kindFloating, string(*other))
		if err != nil {
			return err
		}
		return inUse(what, []string{user})
	}
	f.Port, f.ServiceIP, f.VPC = port, service, vpc
	floatingAt.Put(tx, &f.ID, target)
	if p := placementOf(f); p != nil {
		p.begin()
		return nil
	}
	return awaitHost(tx, f, node)
}

// awaitHost makes a floating IP of a port wait for the port's host, which is "" if the port has none.
func awaitHost(r store.Reader, f *cloud.FloatingIP, node cloud.NodeID) error {
	f.Node, f.Status, f.StatusReason = node, cloud.NetworkPending, "its port has no host yet"
	f.BindingGeneration++
	if node == "" {
		return nil
	}
	lacks, err := lacksNetwork(r, node, f.External)
	if err != nil {
		return err
	}
	f.StatusReason = unconfirmedReason(node)
	if lacks {
		f.StatusReason = lacksExternal(node, f.External)
	}
	return nil
}

// moveFloating makes the floating IP of a port, if there is one, wait for the port's new host.
func moveFloating(tx *store.Tx, port *cloud.Port) error {
	id, err := floatingAt.Get(tx, string(port.ID))
	if err != nil || id == nil {
		return err
	}
	f, err := find(tx, floatingIPs, kindFloating, cloud.Tenant{Org: port.Org, Project: port.Project}, string(*id))
	if err != nil {
		return err
	}
	if err := awaitHost(tx, f, port.Node); err != nil {
		return err
	}
	f.UpdatedAt = tx.Now()
	floatingIPs.Put(tx, f, string(f.Project), string(f.ID))
	return nil
}

// detachFloating removes the target of a floating IP.
func detachFloating(tx *store.Tx, f *cloud.FloatingIP) {
	if target := string(f.Port) + string(f.ServiceIP); target != "" {
		floatingAt.Delete(tx, target)
	}
	if f.VNI != 0 {
		releaseVNI(tx, f.VNI)
	}
	f.Port, f.ServiceIP, f.Fixed, f.VPC, f.Status, f.StatusReason = "", "", netip.Addr{}, "", cloud.NetworkDown, ""
	f.Placement = cloud.Placement{BindingGeneration: f.BindingGeneration + 1}
}

// GetFloatingIP returns a floating IP of the project, or NotFound.
func (s *Service) GetFloatingIP(ctx context.Context, t cloud.Tenant, id cloud.FloatingIPID) (*cloud.FloatingIP, error) {
	return get(ctx, s, floatingIPs, kindFloating, "id", t, string(id))
}

// ListFloatingIPs returns a page of the project's floating IPs, and the token of the next page. An empty port means
// all.
func (s *Service) ListFloatingIPs(ctx context.Context, t cloud.Tenant, p page, port cloud.PortID) ([]*cloud.FloatingIP, string, error) {
	l := listing[cloud.FloatingIP]{
		kind: kindFloating, table: floatingIPs, t: t, page: p, filter: string(port),
		name: func(f *cloud.FloatingIP) string { return f.Name },
		keep: func(f *cloud.FloatingIP) bool { return port == "" || f.Port == port },
	}
	if p.Name != "" {
		return listNamed(ctx, s, l)
	}
	return list(ctx, s, l)
}

// FloatingUpdate describes a change of a floating IP. Nil fields keep their value. If Port or ServiceIP is set, it
// becomes the target; an empty one detaches.
type FloatingUpdate struct {
	ID                cloud.FloatingIPID
	Name, Description *string
	Port              *cloud.PortID
	ServiceIP         *cloud.ServiceIPID
}

// UpdateFloatingIP changes the name, the description and the target of a floating IP.
func (s *Service) UpdateFloatingIP(ctx context.Context, t cloud.Tenant, q FloatingUpdate, body [32]byte) (Result[cloud.FloatingIP], error) {
	if err := cloud.CheckUUID("id", string(q.ID)); err != nil {
		return Result[cloud.FloatingIP]{}, err
	}
	if err := checkTarget(q.target()); err != nil {
		return Result[cloud.FloatingIP]{}, err
	}
	return updateFloatingCommand.Call(ctx, s.opts.Commands, change[FloatingUpdate]{t, body, q})
}

// target returns the new target. Both are empty if the update detaches, or does not change the target.
func (q *FloatingUpdate) target() (port cloud.PortID, service cloud.ServiceIPID) {
	if q.Port != nil {
		port = *q.Port
	}
	if q.ServiceIP != nil {
		service = *q.ServiceIP
	}
	return port, service
}

var updateFloatingCommand = newCommand("network.floating.update", "UpdateFloatingIp", updateFloating)

// updateFloating implements UpdateFloatingIP in a transaction of the leader.
func updateFloating(tx *store.Tx, t cloud.Tenant, q FloatingUpdate) (cloud.FloatingIP, error) {
	f, err := find(tx, floatingIPs, kindFloating, t, string(q.ID))
	if err != nil {
		return cloud.FloatingIP{}, err
	}
	if err := describe(tx, t.Project, kindFloating, string(f.ID), &f.Name, &f.Description, q.Name, q.Description); err != nil {
		return cloud.FloatingIP{}, err
	}
	port, service := q.target()
	if (q.Port != nil || q.ServiceIP != nil) && (port != f.Port || service != f.ServiceIP) {
		if err := retarget(tx, t, f, port, service); err != nil {
			return cloud.FloatingIP{}, err
		}
	}
	f.UpdatedAt = tx.Now()
	floatingIPs.Put(tx, f, string(t.Project), string(f.ID))
	return *f, nil
}

// retarget changes the target of a floating IP. A floating IP of a service IP has a host that the leader chooses. If
// the former and the new target are service IPs, the former host must therefore acknowledge that it no longer has the
// address before the floating IP gets another host.
func retarget(tx *store.Tx, t cloud.Tenant, f *cloud.FloatingIP, port cloud.PortID, service cloud.ServiceIPID) error {
	var former cloud.NodeID
	if placementOf(f) != nil {
		former = cmp.Or(f.Former, f.Node)
	}
	detachFloating(tx, f)
	if err := attachFloating(tx, t, f, port, service); err != nil {
		return err
	}
	if service != "" && former != "" && !mutant.On(mutant.GatewayTwice) {
		f.Former, f.StatusReason = former, withdrawReason(former)
	}
	return nil
}

// DeleteFloatingIP detaches a floating IP and returns its address to the pool.
func (s *Service) DeleteFloatingIP(ctx context.Context, t cloud.Tenant, id cloud.FloatingIPID, body [32]byte) (Result[struct{}], error) {
	if err := cloud.CheckUUID("id", string(id)); err != nil {
		return Result[struct{}]{}, err
	}
	return deleteFloatingCommand.Call(ctx, s.opts.Commands, change[cloud.FloatingIPID]{t, body, id})
}

var deleteFloatingCommand = newCommand("network.floating.delete", "DeleteFloatingIp", deleteFloating)

// deleteFloating implements DeleteFloatingIP in a transaction of the leader.
func deleteFloating(tx *store.Tx, t cloud.Tenant, id cloud.FloatingIPID) (none struct{}, err error) {
	f, err := find(tx, floatingIPs, kindFloating, t, string(id))
	if err != nil {
		return none, err
	}
	external, err := findExternal(tx, f.External)
	if err != nil {
		return none, err
	}
	detachFloating(tx, f)
	releaseExternal(tx, external, f.Address)
	releaseName(tx, t.Project, kindFloating, f.Name)
	floatingIPs.Delete(tx, string(t.Project), string(id))
	return none, returnQuota(tx, t, quantity{FloatingIPs: 1})
}

package network

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var (
	// peerings has each peering twice, at net-peering/<project>/<id> of both projects, so that each project can list it.
	peerings = store.NewTable[cloud.Peering]("net-peering")
	// peeringBetween has the peering of two VPCs, at peering-between/<lesser VPC>/<greater VPC>.
	peeringBetween = store.NewTable[cloud.PeeringID]("peering-between")
	// peeringsOf lists the peerings of a VPC, at peering-of/<vpc>/<id>.
	peeringsOf = store.NewTable[struct{}]("peering-of")
)

// PeeringRequest describes a peering to propose. The peer's org and project are those of the caller if they are empty.
type PeeringRequest struct {
	Name, Description string
	VPC               cloud.VPCID
	Peer              cloud.Tenant
	PeerVPC           cloud.VPCID
}

// CreatePeering proposes to connect two VPCs. The peering is ACTIVE at once if both VPCs belong to one project, and
// otherwise after the other project has accepted it.
func (s *Service) CreatePeering(
	ctx context.Context, t cloud.Tenant, q PeeringRequest, body [32]byte,
) (Result[cloud.Peering], error) {
	if err := cloud.CheckUUID("vpc_id", string(q.VPC)); err != nil {
		return Result[cloud.Peering]{}, err
	}
	if err := cloud.CheckUUID("peer_vpc_id", string(q.PeerVPC)); err != nil {
		return Result[cloud.Peering]{}, err
	}
	if err := cloud.CheckDescription(q.Description); err != nil {
		return Result[cloud.Peering]{}, err
	}
	if q.VPC == q.PeerVPC {
		return Result[cloud.Peering]{}, fault.Invalid("peer_vpc_id", "must be another VPC than vpc_id").With("constraint", "different")
	}
	if q.Peer.Project == "" {
		q.Peer = t
	}
	return createPeeringCommand.Call(ctx, s.opts.Commands, change[PeeringRequest]{t, body, q})
}

var createPeeringCommand = newCommand("network.peering.create", "CreatePeering", createPeering)

// createPeering implements CreatePeering in a transaction of the leader.
func createPeering(tx *store.Tx, t cloud.Tenant, q PeeringRequest) (p cloud.Peering, err error) {
	vpc, err := find(tx, vpcs, kindVPC, t, string(q.VPC))
	if err != nil {
		return p, err
	}
	peer, err := find(tx, vpcs, kindVPC, q.Peer, string(q.PeerVPC))
	if err != nil {
		return p, err
	}
	if peer.Org != q.Peer.Org && q.Peer.Org != "" {
		return p, notFound(kindVPC, string(q.PeerVPC))
	}
	if vpc.CIDR.Overlaps(peer.CIDR) || vpc.CIDR6.IsValid() && peer.CIDR6.IsValid() && vpc.CIDR6.Overlaps(peer.CIDR6) {
		return p, fault.Invalid("peer_vpc_id", "the prefixes of the VPCs overlap").With("constraint", "no_overlap")
	}
	other, err := peeringBetween.Get(tx, between(vpc.ID, peer.ID)...)
	if err != nil {
		return p, err
	}
	if other != nil {
		return p, fault.New(fault.AlreadyExists, "peering %s connects these VPCs", *other).WithReason("PEERING_EXISTS")
	}
	if err := checkPeers(tx, vpc, peer); err != nil {
		return p, err
	}
	if t.Project == peer.Project {
		if err := checkPeers(tx, peer, vpc); err != nil {
			return p, err
		}
	}
	id, err := newID()
	if err != nil {
		return p, err
	}
	if err := claimName(tx, t.Project, kindPeering, q.Name, id); err != nil {
		return p, err
	}
	p = cloud.Peering{
		ID: cloud.PeeringID(id), Name: q.Name, Description: q.Description, Org: t.Org, Project: t.Project, VPC: vpc.ID,
		PeerOrg: peer.Org, PeerProject: peer.Project, PeerVPC: peer.ID, Status: cloud.NetworkPending,
		CreatedAt: tx.Now(), UpdatedAt: tx.Now(),
	}
	if p.Project == p.PeerProject {
		p.Status = cloud.NetworkActive
	}
	peeringBetween.Put(tx, &p.ID, between(vpc.ID, peer.ID)...)
	for _, v := range []cloud.VPCID{vpc.ID, peer.ID} {
		peeringsOf.Put(tx, &struct{}{}, string(v), id)
	}
	putPeering(tx, &p)
	return p, nil
}

// between returns the path of a pair of VPCs, which does not depend on their order.
func between(a, b cloud.VPCID) []string {
	return []string{string(min(a, b)), string(max(a, b))}
}

// putPeering writes both records of a peering.
func putPeering(tx *store.Tx, p *cloud.Peering) {
	peerings.Put(tx, p, string(p.Project), string(p.ID))
	peerings.Put(tx, p, string(p.PeerProject), string(p.ID))
}

func findPeering(r store.Reader, t cloud.Tenant, id cloud.PeeringID) (*cloud.Peering, error) {
	return find(r, peerings, kindPeering, t, string(id))
}

// AcceptPeering accepts a proposal of another project. It changes nothing if the peering was accepted already.
func (s *Service) AcceptPeering(
	ctx context.Context, t cloud.Tenant, id cloud.PeeringID, body [32]byte,
) (Result[cloud.Peering], error) {
	if err := cloud.CheckUUID("id", string(id)); err != nil {
		return Result[cloud.Peering]{}, err
	}
	return acceptPeeringCommand.Call(ctx, s.opts.Commands, change[cloud.PeeringID]{t, body, id})
}

var acceptPeeringCommand = newCommand("network.peering.accept", "AcceptPeering", acceptPeering)

// acceptPeering implements AcceptPeering in a transaction of the leader.
func acceptPeering(tx *store.Tx, t cloud.Tenant, id cloud.PeeringID) (cloud.Peering, error) {
	p, err := findPeering(tx, t, id)
	if err != nil {
		return cloud.Peering{}, err
	}
	if p.PeerProject != t.Project {
		return cloud.Peering{}, fault.New(fault.PermissionDenied, "project %s proposed the peering: project %s must accept it", p.Project, p.PeerProject)
	}
	if p.Status == cloud.NetworkPending {
		if err := checkAcceptance(tx, p); err != nil {
			return cloud.Peering{}, err
		}
		p.Status, p.UpdatedAt = cloud.NetworkActive, tx.Now()
		putPeering(tx, p)
	}
	return *p, nil
}

// GetPeering returns a peering of one of the project's VPCs, or NotFound.
func (s *Service) GetPeering(ctx context.Context, t cloud.Tenant, id cloud.PeeringID) (*cloud.Peering, error) {
	return get(ctx, s, peerings, kindPeering, "id", t, string(id))
}

// ListPeerings returns a page of the project's peerings, and the token of the next page. An empty vpc means all.
// Several peerings can have one name, because a project also lists those that other projects proposed.
func (s *Service) ListPeerings(
	ctx context.Context, t cloud.Tenant, p page, vpc cloud.VPCID,
) ([]*cloud.Peering, string, error) {
	l := listing[cloud.Peering]{
		kind: kindPeering, table: peerings, t: t, page: p, filter: string(vpc),
		name: func(n *cloud.Peering) string { return n.Name },
		keep: func(n *cloud.Peering) bool { return vpc == "" || n.VPC == vpc || n.PeerVPC == vpc },
	}
	if vpc != "" {
		return listOf(ctx, s, l, peeringsOf, string(vpc))
	}
	return list(ctx, s, l)
}

// PeeringUpdate describes a change of a peering. Nil fields keep their value.
type PeeringUpdate struct {
	ID                cloud.PeeringID
	Name, Description *string
}

// UpdatePeering changes the name and the description of a peering. It returns PermissionDenied to the project to which
// the peering was proposed, because the name of a peering is unique only in the proposing project.
func (s *Service) UpdatePeering(
	ctx context.Context, t cloud.Tenant, q PeeringUpdate, body [32]byte,
) (Result[cloud.Peering], error) {
	if err := cloud.CheckUUID("id", string(q.ID)); err != nil {
		return Result[cloud.Peering]{}, err
	}
	return updatePeeringCommand.Call(ctx, s.opts.Commands, change[PeeringUpdate]{t, body, q})
}

var updatePeeringCommand = newCommand("network.peering.update", "UpdatePeering", updatePeering)

// updatePeering implements UpdatePeering in a transaction of the leader.
func updatePeering(tx *store.Tx, t cloud.Tenant, q PeeringUpdate) (cloud.Peering, error) {
	p, err := findPeering(tx, t, q.ID)
	if err != nil {
		return cloud.Peering{}, err
	}
	if p.Project != t.Project {
		return cloud.Peering{}, fault.New(fault.PermissionDenied,
			"project %s proposed the peering: only that project can change its name and description", p.Project)
	}
	if err := describe(
		tx, t.Project, kindPeering, string(p.ID), &p.Name, &p.Description, q.Name, q.Description,
	); err != nil {
		return cloud.Peering{}, err
	}
	p.UpdatedAt = tx.Now()
	putPeering(tx, p)
	return *p, nil
}

// DeletePeering ends a peering or refuses a proposal. It also removes the routes to the peering, and the backends of
// service IPs that are addresses of the other VPC.
func (s *Service) DeletePeering(
	ctx context.Context, t cloud.Tenant, id cloud.PeeringID, body [32]byte,
) (Result[struct{}], error) {
	if err := cloud.CheckUUID("id", string(id)); err != nil {
		return Result[struct{}]{}, err
	}
	return deletePeeringCommand.Call(ctx, s.opts.Commands, change[cloud.PeeringID]{t, body, id})
}

var deletePeeringCommand = newCommand("network.peering.delete", "DeletePeering", deletePeering)

// deletePeering implements DeletePeering in a transaction of the leader.
func deletePeering(tx *store.Tx, t cloud.Tenant, id cloud.PeeringID) (none struct{}, err error) {
	p, err := findPeering(tx, t, id)
	if err != nil {
		return none, err
	}
	for _, project := range []cloud.ProjectID{p.Project, p.PeerProject} {
		if err := removeRoutes(tx, project, string(id)); err != nil {
			return none, err
		}
		peerings.Delete(tx, string(project), string(id))
	}
	for _, v := range []cloud.VPCID{p.VPC, p.PeerVPC} {
		// A peering that is only proposed permits no backends, so there are none to remove. Its VPCs can have the same
		// prefixes as VPCs with an active peering. The backends in these VPCs must remain.
		if p.Status == cloud.NetworkActive {
			if err := removePeerBackends(tx, p, v); err != nil {
				return none, err
			}
		}
		peeringsOf.Delete(tx, string(v), string(id))
	}
	peeringBetween.Delete(tx, between(p.VPC, p.PeerVPC)...)
	releaseName(tx, p.Project, kindPeering, p.Name)
	return none, nil
}

// removeRoutes removes the routes to a target from the route tables of a project.
func removeRoutes(tx *store.Tx, project cloud.ProjectID, target string) error {
	tables, _, err := routeTargets.List(tx, 0, target)
	if err != nil {
		return err
	}
	for _, u := range tables {
		table, err := routeTables.Get(tx, string(project), u.Path[1])
		if err != nil {
			return err
		}
		if table == nil {
			continue // a table of the other project
		}
		table.Routes = without(table.Routes, target)
		table.UpdatedAt = tx.Now()
		routeTables.Put(tx, table, string(project), string(table.ID))
		routeTargets.Delete(tx, target, string(table.ID))
	}
	return nil
}

// without returns the routes that do not lead to a target.
func without(routes []cloud.Route, target string) (out []cloud.Route) {
	for _, r := range routes {
		if r.ID != target {
			out = append(out, r)
		}
	}
	return out
}

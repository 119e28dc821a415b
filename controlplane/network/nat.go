package network

import (
	"context"
	"net/netip"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var (
	// natGateways is the table of NAT gateways, at net-nat/<project>/<id>.
	natGateways = store.NewTable[cloud.NATGateway]("net-nat")
	// natIn lists the NAT gateways of a VPC, at nat-in/<vpc>/<id>. The value is true for the default gateway.
	natIn = store.NewTable[bool]("nat-in")
	// natOf lists the NAT gateways of an external network, at nat-of/<network>/<id>.
	natOf = store.NewTable[struct{}]("nat-of")
)

// NATRequest describes a NAT gateway to create. An empty External means the only external network.
type NATRequest struct {
	Name, Description string
	VPC               cloud.VPCID
	External          string
	OwnAddress        bool
	Default           bool
}

// CreateNATGateway creates a NAT gateway of a VPC. It returns AlreadyExists if the VPC has a default gateway and the
// new one is to be the default, too. An address of its own counts as a floating IP in the quota, and it returns
// ResourceExhausted if the VPC has maxNATGateways.
func (s *Service) CreateNATGateway(ctx context.Context, t cloud.Tenant, q NATRequest, body [32]byte) (Result[cloud.NATGateway], error) {
	if err := cloud.CheckUUID("vpc_id", string(q.VPC)); err != nil {
		return Result[cloud.NATGateway]{}, err
	}
	if err := cloud.CheckDescription(q.Description); err != nil {
		return Result[cloud.NATGateway]{}, err
	}
	return createNATCommand.Call(ctx, s.opts.Commands, change[NATRequest]{t, body, q})
}

var createNATCommand = newCommand("network.nat.create", "CreateNatGateway", createNAT)

// maxNATGateways is the maximum number of NAT gateways of a VPC, and maxRouteTables that of its route tables. Neither
// has a quota, and hosts keep both in memory.
const maxNATGateways, maxRouteTables = 10, 100

// checkRoom returns ResourceExhausted if an index lists limit resources of a kind in a VPC.
func checkRoom[T any](r store.Reader, index store.Table[T], vpc *cloud.VPC, kind string, limit int) error {
	all, _, err := index.List(r, limit, string(vpc.ID))
	if err == nil && len(all) >= limit {
		return fault.New(fault.ResourceExhausted, "%s has %d %ss and can have no more", label(kindVPC, vpc.Name, string(vpc.ID)), limit, kind).
			WithReason("VPC_FULL")
	}
	return err
}

// createNAT implements CreateNATGateway in a transaction of the leader.
func createNAT(tx *store.Tx, t cloud.Tenant, q NATRequest) (nat cloud.NATGateway, err error) {
	vpc, err := find(tx, vpcs, kindVPC, t, string(q.VPC))
	if err != nil {
		return nat, err
	}
	external, err := findExternal(tx, q.External)
	if err != nil {
		return nat, err
	}
	if q.Default {
		if err := checkNoDefaultNAT(tx, vpc); err != nil {
			return nat, err
		}
	}
	if err := checkRoom(tx, natIn, vpc, kindNAT, maxNATGateways); err != nil {
		return nat, err
	}
	id, err := newID()
	if err != nil {
		return nat, err
	}
	if err := claimName(tx, t.Project, kindNAT, q.Name, id); err != nil {
		return nat, err
	}
	nat = cloud.NATGateway{
		ID: cloud.NATGatewayID(id), Name: q.Name, Org: t.Org, Project: t.Project, Description: q.Description, VPC: vpc.ID,
		External: external.Name, Default: q.Default, CreatedAt: tx.Now(), UpdatedAt: tx.Now(),
	}
	if q.OwnAddress {
		if err := chargeQuota(tx, t, quantity{FloatingIPs: 1}); err != nil {
			return nat, err
		}
		if nat.Address, err = assignExternal(tx, external, netip.Addr{}, "NAT gateway "+id); err != nil {
			return nat, err
		}
	}
	beginGateway(&nat)
	natIn.Put(tx, &nat.Default, string(vpc.ID), id)
	natOf.Put(tx, &struct{}{}, external.Name, id)
	natGateways.Put(tx, &nat, string(t.Project), id)
	return nat, nil
}

// checkNoDefaultNAT returns AlreadyExists if a VPC has a default NAT gateway.
func checkNoDefaultNAT(tx *store.Tx, vpc *cloud.VPC) error {
	all, _, err := natIn.List(tx, 0, string(vpc.ID))
	if err != nil {
		return err
	}
	for _, g := range all {
		if *g.Value {
			other, err := labelOf(tx, vpc.Project, kindNAT, g.Path[1])
			if err != nil {
				return err
			}
			return fault.New(fault.AlreadyExists, "%s is the default of %s already", other, label(kindVPC, vpc.Name, string(vpc.ID))).
				WithReason("DEFAULT_EXISTS")
		}
	}
	return nil
}

// GetNATGateway returns a NAT gateway of the project, or NotFound.
func (s *Service) GetNATGateway(ctx context.Context, t cloud.Tenant, id cloud.NATGatewayID) (*cloud.NATGateway, error) {
	return get(ctx, s, natGateways, kindNAT, "id", t, string(id))
}

// ListNATGateways returns a page of the project's NAT gateways, and the token of the next page. An empty vpc means all.
func (s *Service) ListNATGateways(ctx context.Context, t cloud.Tenant, p page, vpc cloud.VPCID) ([]*cloud.NATGateway, string, error) {
	return listIn(ctx, s, listing[cloud.NATGateway]{
		kind: kindNAT, table: natGateways, t: t, page: p, name: func(n *cloud.NATGateway) string { return n.Name },
		keep: func(n *cloud.NATGateway) bool { return vpc == "" || n.VPC == vpc },
	}, natIn, vpc)
}

// DeleteNATGateway deletes a NAT gateway to which no route refers.
func (s *Service) DeleteNATGateway(ctx context.Context, t cloud.Tenant, id cloud.NATGatewayID, body [32]byte) (Result[struct{}], error) {
	if err := cloud.CheckUUID("id", string(id)); err != nil {
		return Result[struct{}]{}, err
	}
	return deleteNATCommand.Call(ctx, s.opts.Commands, change[cloud.NATGatewayID]{t, body, id})
}

var deleteNATCommand = newCommand("network.nat.delete", "DeleteNatGateway", deleteNAT)

// deleteNAT implements DeleteNATGateway in a transaction of the leader.
func deleteNAT(tx *store.Tx, t cloud.Tenant, id cloud.NATGatewayID) (none struct{}, err error) {
	nat, err := find(tx, natGateways, kindNAT, t, string(id))
	if err != nil {
		return none, err
	}
	users, err := routesTo(tx, t.Project, string(id))
	if err != nil {
		return none, err
	}
	if len(users) > 0 {
		return none, inUse(label(kindNAT, nat.Name, string(id)), users)
	}
	return none, removeNAT(tx, nat)
}

// removeNAT deletes the records of a NAT gateway and releases its address.
func removeNAT(tx *store.Tx, nat *cloud.NATGateway) error {
	if nat.Address.IsValid() {
		external, err := findExternal(tx, nat.External)
		if err != nil {
			return err
		}
		releaseExternal(tx, external, nat.Address)
		if err := returnQuota(tx, cloud.Tenant{Org: nat.Org, Project: nat.Project}, quantity{FloatingIPs: 1}); err != nil {
			return err
		}
	}
	if nat.VNI != 0 {
		releaseVNI(tx, nat.VNI)
	}
	releaseName(tx, nat.Project, kindNAT, nat.Name)
	natIn.Delete(tx, string(nat.VPC), string(nat.ID))
	natOf.Delete(tx, nat.External, string(nat.ID))
	natGateways.Delete(tx, string(nat.Project), string(nat.ID))
	return nil
}

package network

import (
	"cmp"
	"context"
	"net/netip"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// vpcs is the table of VPCs, at net-vpc/<project>/<id>.
var vpcs = store.NewTable[cloud.VPC]("net-vpc")

// minMTU, maxMTU and defaultMTU are the limits and the default of the MTU of a VPC, in bytes. minMTU is the minimum of
// IPv6 (RFC 8200). With maxMTU, packets with the overhead of VXLAN have the maximum size of an IP packet. defaultMTU is
// for an underlay with an MTU of 1500.
const (
	minMTU, maxMTU = 1280, 65535 - cloud.VXLANOverhead
	defaultMTU     = 1500 - cloud.VXLANOverhead
)

// VPCRequest describes a VPC to create. CIDR6 is invalid for a VPC without IPv6. An MTU of 0 means defaultMTU.
type VPCRequest struct {
	Name, Description string
	CIDR, CIDR6       netip.Prefix
	// ServiceCIDR is invalid for a VPC without a range of addresses for service IPs.
	ServiceCIDR netip.Prefix
	MTU         uint32 `cbor:",omitempty"`
	// NAT is true for a VPC with a default NAT gateway to the external network External. An empty External means the
	// only external network.
	NAT      bool
	External string
	// Default is true for the default VPC of the project. Only defaultVPC sets it.
	Default bool `cbor:",omitempty"`
}

// CreateVPC creates a VPC, with q.NAT also its default NAT gateway. It creates the security group "default" if the
// project has none.
func (s *Service) CreateVPC(
	ctx context.Context, t cloud.Tenant, q VPCRequest, body [32]byte,
) (Result[cloud.VPC], error) {
	if err := q.check(); err != nil {
		return Result[cloud.VPC]{}, err
	}
	return createVPCCommand.Call(ctx, s.opts.Commands, change[VPCRequest]{t, body, q})
}

func (q *VPCRequest) check() error {
	if err := cloud.CheckVPCPrefix("cidr_block", q.CIDR); err != nil {
		return err
	}
	if q.CIDR6.IsValid() {
		if err := cloud.CheckVPCPrefix6("ipv6_cidr_block", q.CIDR6); err != nil {
			return err
		}
	}
	if q.ServiceCIDR.IsValid() {
		if err := cloud.CheckServicePrefix("service_cidr_block", q.CIDR, q.ServiceCIDR); err != nil {
			return err
		}
	}
	if q.MTU != 0 && (q.MTU < minMTU || q.MTU > maxMTU) {
		return fault.Invalid("mtu", "must be %d to %d, got %d", minMTU, maxMTU, q.MTU).With("constraint", "range")
	}
	if q.External != "" && !q.NAT {
		return fault.Invalid("external_network", "must be empty unless egress is NAT").With("constraint", "egress")
	}
	return cloud.CheckDescription(q.Description)
}

var createVPCCommand = newCommand("network.vpc.create", "CreateVpc", createVPC)

// createVPC implements CreateVPC in a transaction of the leader.
func createVPC(tx *store.Tx, t cloud.Tenant, q VPCRequest) (vpc cloud.VPC, err error) {
	if err := checkReserved(kindVPC, q.Name, q.Default); err != nil {
		return vpc, err
	}
	if err := chargeQuota(tx, t, quantity{VPCs: 1}); err != nil {
		return vpc, err
	}
	id, err := newID()
	if err != nil {
		return vpc, err
	}
	if err := claimName(tx, t.Project, kindVPC, q.Name, id); err != nil {
		return vpc, err
	}
	if _, err := defaultGroup(tx, t); err != nil {
		return vpc, err
	}
	vpc = cloud.VPC{
		ID: cloud.VPCID(id), Name: q.Name, Org: t.Org, Project: t.Project, Description: q.Description,
		CIDR: q.CIDR, CIDR6: q.CIDR6, ServiceCIDR: q.ServiceCIDR, Default: q.Default,
		MTU: uint16(cmp.Or(q.MTU, defaultMTU)), Status: cloud.NetworkActive, CreatedAt: tx.Now(), UpdatedAt: tx.Now(),
	}
	vpcs.Put(tx, &vpc, string(t.Project), id)
	if q.Default {
		defaultVPCs.Put(tx, &vpc.ID, string(t.Project))
	}
	if q.NAT {
		_, err = createNAT(tx, t, NATRequest{VPC: vpc.ID, External: q.External, Default: true})
	}
	return vpc, err
}

// GetVPC returns a VPC of the project, or NotFound.
func (s *Service) GetVPC(ctx context.Context, t cloud.Tenant, id cloud.VPCID) (*cloud.VPC, error) {
	return get(ctx, s, vpcs, kindVPC, "id", t, string(id))
}

// ListVPCs returns a page of the project's VPCs, and the token of the next page.
func (s *Service) ListVPCs(ctx context.Context, t cloud.Tenant, p page) ([]*cloud.VPC, string, error) {
	l := listing[cloud.VPC]{
		kind: kindVPC, table: vpcs, t: t, page: p, keep: func(*cloud.VPC) bool { return true },
		name: func(v *cloud.VPC) string { return v.Name },
	}
	if p.Name != "" {
		return listNamed(ctx, s, l)
	}
	return list(ctx, s, l)
}

// ListAllVPCs returns a page of the VPCs within t, of all projects for the zero t, and the token of the next page.
func (s *Service) ListAllVPCs(ctx context.Context, t cloud.Tenant, p page) ([]*cloud.VPC, string, error) {
	return listAll(ctx, s, listing[cloud.VPC]{table: vpcs, t: t, page: p},
		func(v *cloud.VPC) cloud.Tenant { return cloud.Tenant{Org: v.Org, Project: v.Project} })
}

// VPCUpdate describes a change of a VPC. Nil fields keep their value.
type VPCUpdate struct {
	ID                cloud.VPCID
	Name, Description *string
}

// UpdateVPC changes the name and the description of a VPC.
func (s *Service) UpdateVPC(
	ctx context.Context, t cloud.Tenant, q VPCUpdate, body [32]byte,
) (Result[cloud.VPC], error) {
	if err := cloud.CheckUUID("id", string(q.ID)); err != nil {
		return Result[cloud.VPC]{}, err
	}
	return updateVPCCommand.Call(ctx, s.opts.Commands, change[VPCUpdate]{t, body, q})
}

var updateVPCCommand = newCommand("network.vpc.update", "UpdateVpc", updateVPC)

// updateVPC implements UpdateVPC in a transaction of the leader.
func updateVPC(tx *store.Tx, t cloud.Tenant, q VPCUpdate) (cloud.VPC, error) {
	vpc, err := find(tx, vpcs, kindVPC, t, string(q.ID))
	if err != nil {
		return cloud.VPC{}, err
	}
	if q.Name != nil {
		if err := checkReserved(kindVPC, *q.Name, vpc.Default); err != nil {
			return cloud.VPC{}, err
		}
	}
	if err := describe(tx, t.Project, kindVPC, string(vpc.ID), &vpc.Name, &vpc.Description, q.Name, q.Description); err != nil {
		return cloud.VPC{}, err
	}
	vpc.UpdatedAt = tx.Now()
	vpcs.Put(tx, vpc, string(t.Project), string(vpc.ID))
	return *vpc, nil
}

// describe changes the name and the description of a resource, to newName and newDescription unless they are nil.
func describe(
	tx *store.Tx, p cloud.ProjectID, kind, id string, name, description, newName, newDescription *string,
) error {
	if newName != nil {
		if err := rename(tx, p, kind, *name, *newName, id); err != nil {
			return err
		}
		*name = *newName
	}
	if newDescription != nil {
		if err := cloud.CheckDescription(*newDescription); err != nil {
			return err
		}
		*description = *newDescription
	}
	return nil
}

// DeleteVPC deletes a VPC without subnets, service IPs and ACTIVE peerings, and with it its NAT gateways, its route
// tables, and the proposals of peerings with it that were not accepted.
func (s *Service) DeleteVPC(
	ctx context.Context, t cloud.Tenant, id cloud.VPCID, body [32]byte,
) (Result[struct{}], error) {
	if err := cloud.CheckUUID("id", string(id)); err != nil {
		return Result[struct{}]{}, err
	}
	return deleteVPCCommand.Call(ctx, s.opts.Commands, change[cloud.VPCID]{t, body, id})
}

var deleteVPCCommand = newCommand("network.vpc.delete", "DeleteVpc", deleteVPC)

// deleteVPC implements DeleteVPC in a transaction of the leader.
func deleteVPC(tx *store.Tx, t cloud.Tenant, id cloud.VPCID) (none struct{}, err error) {
	vpc, err := find(tx, vpcs, kindVPC, t, string(id))
	if err != nil {
		return none, err
	}
	users, proposed, err := vpcUsers(tx, vpc)
	if err != nil {
		return none, err
	}
	if len(users) > 0 {
		return none, inUse(label(kindVPC, vpc.Name, string(id)), users)
	}
	for _, p := range proposed {
		if _, err := deletePeering(tx, t, p); err != nil {
			return none, err
		}
	}
	if err := removeGateways(tx, t, id); err != nil {
		return none, err
	}
	if vpc.Default {
		defaultVPCs.Delete(tx, string(t.Project))
	}
	if err := forgetAddresses(tx, serviceSpace(vpc).Owner); err != nil {
		return none, err
	}
	releaseName(tx, t.Project, kindVPC, vpc.Name)
	vpcs.Delete(tx, string(t.Project), string(id))
	return none, returnQuota(tx, t, quantity{VPCs: 1})
}

// vpcUsers returns the labels of subnets, service IPs and ACTIVE peerings of a VPC, up to maxNamedUsers+1 of each, and
// the IDs of its other peerings.
func vpcUsers(r store.Reader, vpc *cloud.VPC) (users []string, proposed []cloud.PeeringID, err error) {
	inside, err := listUsers(r, subnetsOf, vpc.Project, string(vpc.ID), "", kindSubnet)
	if err != nil {
		return nil, nil, err
	}
	services, err := listUsers(r, servicesIn, vpc.Project, string(vpc.ID), "", kindService)
	if err != nil {
		return nil, nil, err
	}
	connected, proposed, err := activePeerings(r, vpc)
	return slices.Concat(inside, services, connected), proposed, err
}

// removeGateways deletes the route tables and NAT gateways of a VPC.
func removeGateways(tx *store.Tx, t cloud.Tenant, id cloud.VPCID) error {
	tables, _, err := tablesIn.List(tx, 0, string(id))
	if err != nil {
		return err
	}
	for _, u := range tables {
		table, err := find(tx, routeTables, kindTable, t, u.Path[1])
		if err != nil {
			return err
		}
		removeTable(tx, table)
	}
	gateways, _, err := natIn.List(tx, 0, string(id))
	if err != nil {
		return err
	}
	for _, u := range gateways {
		nat, err := find(tx, natGateways, kindNAT, t, u.Path[1])
		if err != nil {
			return err
		}
		if err := removeNAT(tx, nat); err != nil {
			return err
		}
	}
	return nil
}

package network

import (
	"context"
	"net/netip"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// prefixes are the prefixes of a subnet. CIDR6 is invalid without IPv6.
type prefixes struct{ CIDR, CIDR6 netip.Prefix }

var (
	// subnets is the table of subnets, at net-subnet/<project>/<id>.
	subnets = store.NewTable[cloud.Subnet]("net-subnet")
	// subnetsOf has the prefixes of the subnets of a VPC, at subnet-of/<vpc>/<subnet>.
	subnetsOf = store.NewTable[prefixes]("subnet-of")
)

// SubnetRequest describes a subnet to create. Gateway is invalid for the first host address, and CIDR6 for a subnet
// without IPv6.
type SubnetRequest struct {
	Name, Description string
	VPC               cloud.VPCID
	CIDR, CIDR6       netip.Prefix
	Gateway           netip.Addr
	DHCP              bool
	DNS               []netip.Addr
}

// CreateSubnet creates a subnet of a VPC. It returns InvalidArgument if the subnet is not within the VPC or overlaps
// another subnet of it, or if no port can have the gateway's address.
func (s *Service) CreateSubnet(
	ctx context.Context, t cloud.Tenant, q SubnetRequest, body [32]byte,
) (Result[SubnetInfo], error) {
	if err := q.check(); err != nil {
		return Result[SubnetInfo]{}, err
	}
	return createSubnetCommand.Call(ctx, s.opts.Commands, change[SubnetRequest]{t, body, q})
}

func (q *SubnetRequest) check() error {
	if err := cloud.CheckUUID("vpc_id", string(q.VPC)); err != nil {
		return err
	}
	if q.Gateway.IsValid() {
		if err := cloud.CheckGateway("gateway_ip", q.CIDR, q.Gateway); err != nil {
			return err
		}
	}
	if err := checkDNS(q.DNS); err != nil {
		return err
	}
	return cloud.CheckDescription(q.Description)
}

func checkDNS(servers []netip.Addr) error {
	if len(servers) > cloud.MaxDNSServers {
		return fault.Invalid("dns_servers", "must be at most %d, got %d", cloud.MaxDNSServers, len(servers)).With("constraint", "max_items")
	}
	for _, a := range servers {
		if !a.IsGlobalUnicast() {
			return fault.Invalid("dns_servers", "must be unicast addresses, got %s", a).With("constraint", "unicast")
		}
	}
	return nil
}

var createSubnetCommand = newCommand("network.subnet.create", "CreateSubnet", createSubnet)

// createSubnet implements CreateSubnet in a transaction of the leader.
func createSubnet(tx *store.Tx, t cloud.Tenant, q SubnetRequest) (out SubnetInfo, err error) {
	vpc, err := find(tx, vpcs, kindVPC, t, string(q.VPC))
	if err != nil {
		return out, err
	}
	if err := checkReserved(kindSubnet, q.Name, vpc.Default); err != nil {
		return out, err
	}
	if err := checkPrefixes(tx, vpc, &q); err != nil {
		return out, err
	}
	if err := chargeQuota(tx, t, quantity{Subnets: 1}); err != nil {
		return out, err
	}
	id, err := newID()
	if err != nil {
		return out, err
	}
	if err := claimName(tx, t.Project, kindSubnet, q.Name, id); err != nil {
		return out, err
	}
	subnet := cloud.Subnet{
		ID: cloud.SubnetID(id), Name: q.Name, VPC: vpc.ID, Org: t.Org, Project: t.Project, Description: q.Description,
		CIDR: q.CIDR, CIDR6: q.CIDR6, Gateway: q.Gateway, DHCP: q.DHCP, DNS: q.DNS,
		Status: cloud.NetworkActive, CreatedAt: tx.Now(), UpdatedAt: tx.Now(),
	}
	if !subnet.Gateway.IsValid() {
		subnet.Gateway = q.CIDR.Addr().Next()
	}
	if subnet.VNI, err = assignVNI(tx, string(subnet.ID)); err != nil {
		return out, err
	}
	for _, a := range []netip.Addr{q.CIDR.Addr(), subnet.Gateway, cloud.Last(q.CIDR)} {
		if err := assignAddress(tx, &subnet, a); err != nil {
			return out, err
		}
	}
	subnetsOf.Put(tx, &prefixes{q.CIDR, q.CIDR6}, string(vpc.ID), id)
	subnets.Put(tx, &subnet, string(t.Project), id)
	return withAvailable(tx, &subnet)
}

// checkPrefixes returns InvalidArgument unless the prefixes of a new subnet are within the VPC and free.
func checkPrefixes(tx *store.Tx, vpc *cloud.VPC, q *SubnetRequest) error {
	if err := cloud.CheckSubnetPrefix("cidr_block", vpc, q.CIDR); err != nil {
		return err
	}
	if q.CIDR6.IsValid() {
		if err := cloud.CheckSubnetPrefix6("ipv6_cidr_block", vpc, q.CIDR6); err != nil {
			return err
		}
	}
	others, _, err := subnetsOf.List(tx, 0, string(vpc.ID))
	if err != nil {
		return err
	}
	for _, o := range others {
		field, mine, theirs := "", netip.Prefix{}, netip.Prefix{}
		switch {
		case o.Value.CIDR.Overlaps(q.CIDR):
			field, mine, theirs = "cidr_block", q.CIDR, o.Value.CIDR
		case q.CIDR6.IsValid() && o.Value.CIDR6.IsValid() && o.Value.CIDR6.Overlaps(q.CIDR6):
			field, mine, theirs = "ipv6_cidr_block", q.CIDR6, o.Value.CIDR6
		default:
			continue
		}
		other, err := labelOf(tx, vpc.Project, kindSubnet, o.Path[1])
		if err != nil {
			return err
		}
		return fault.Invalid(field, "%s overlaps %s of %s", mine, theirs, other).With("constraint", "no_overlap")
	}
	return nil
}

// SubnetInfo is a subnet with the number of addresses that CreatePort can assign now.
type SubnetInfo struct {
	cloud.Subnet
	Available uint64
}

// GetSubnet returns a subnet of the project, or NotFound.
func (s *Service) GetSubnet(ctx context.Context, t cloud.Tenant, id cloud.SubnetID) (out SubnetInfo, err error) {
	if err := cloud.CheckUUID("id", string(id)); err != nil {
		return out, err
	}
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		subnet, err := find(v, subnets, kindSubnet, t, string(id))
		if err != nil {
			return err
		}
		out, err = withAvailable(v, subnet)
		return err
	})
	return out, err
}

func withAvailable(r store.Reader, s *cloud.Subnet) (SubnetInfo, error) {
	n, err := availableAddresses(r, s)
	return SubnetInfo{*s, n}, err
}

// SubnetFilter selects subnets. An empty VPC means all.
type SubnetFilter struct{ VPC cloud.VPCID }

// ListSubnets returns a page of the project's subnets, and the token of the next page.
func (s *Service) ListSubnets(
	ctx context.Context, t cloud.Tenant, p page, f SubnetFilter,
) (out []SubnetInfo, next string, err error) {
	all, next, err := listIn(ctx, s, listing[cloud.Subnet]{
		kind: kindSubnet, table: subnets, t: t, page: p, name: func(n *cloud.Subnet) string { return n.Name },
		keep: func(n *cloud.Subnet) bool { return f.VPC == "" || n.VPC == f.VPC },
	}, subnetsOf, f.VPC)
	if err != nil {
		return nil, "", err
	}
	out, err = s.countFree(ctx, all)
	return out, next, err
}

// ListAllSubnets returns a page of the subnets within t, of all projects for the zero t, and the token of the next page.
func (s *Service) ListAllSubnets(ctx context.Context, t cloud.Tenant, p page) (out []SubnetInfo, next string, err error) {
	all, next, err := listAll(ctx, s, listing[cloud.Subnet]{table: subnets, t: t, page: p},
		func(n *cloud.Subnet) cloud.Tenant { return cloud.Tenant{Org: n.Org, Project: n.Project} })
	if err != nil {
		return nil, "", err
	}
	out, err = s.countFree(ctx, all)
	return out, next, err
}

// countFree returns the subnets with the present number of their free addresses.
func (s *Service) countFree(ctx context.Context, all []*cloud.Subnet) (out []SubnetInfo, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		out = nil
		for _, n := range all {
			info, err := withAvailable(v, n)
			if err != nil {
				return err
			}
			out = append(out, info)
		}
		return nil
	})
	return out, err
}

// SubnetUpdate describes a change of a subnet. Nil fields keep their value.
type SubnetUpdate struct {
	ID                cloud.SubnetID
	Name, Description *string
	DHCP              *bool
	DNS               *[]netip.Addr
}

// UpdateSubnet changes the name, the description, DHCP and the DNS servers of a subnet.
func (s *Service) UpdateSubnet(
	ctx context.Context, t cloud.Tenant, q SubnetUpdate, body [32]byte,
) (Result[SubnetInfo], error) {
	if err := cloud.CheckUUID("id", string(q.ID)); err != nil {
		return Result[SubnetInfo]{}, err
	}
	if q.DNS != nil {
		if err := checkDNS(*q.DNS); err != nil {
			return Result[SubnetInfo]{}, err
		}
	}
	return updateSubnetCommand.Call(ctx, s.opts.Commands, change[SubnetUpdate]{t, body, q})
}

var updateSubnetCommand = newCommand("network.subnet.update", "UpdateSubnet", updateSubnet)

// updateSubnet implements UpdateSubnet in a transaction of the leader.
func updateSubnet(tx *store.Tx, t cloud.Tenant, q SubnetUpdate) (out SubnetInfo, err error) {
	subnet, err := find(tx, subnets, kindSubnet, t, string(q.ID))
	if err != nil {
		return out, err
	}
	if q.Name != nil {
		vpc, err := find(tx, vpcs, kindVPC, t, string(subnet.VPC))
		if err != nil {
			return out, err
		}
		if err := checkReserved(kindSubnet, *q.Name, vpc.Default); err != nil {
			return out, err
		}
	}
	if err := describe(tx, t.Project, kindSubnet, string(subnet.ID), &subnet.Name, &subnet.Description, q.Name, q.Description); err != nil {
		return out, err
	}
	if q.DHCP != nil {
		subnet.DHCP = *q.DHCP
	}
	if q.DNS != nil {
		subnet.DNS = *q.DNS
	}
	subnet.UpdatedAt = tx.Now()
	subnets.Put(tx, subnet, string(t.Project), string(subnet.ID))
	return withAvailable(tx, subnet)
}

// DeleteSubnet deletes a subnet without ports.
func (s *Service) DeleteSubnet(
	ctx context.Context, t cloud.Tenant, id cloud.SubnetID, body [32]byte,
) (Result[struct{}], error) {
	if err := cloud.CheckUUID("id", string(id)); err != nil {
		return Result[struct{}]{}, err
	}
	return deleteSubnetCommand.Call(ctx, s.opts.Commands, change[cloud.SubnetID]{t, body, id})
}

var deleteSubnetCommand = newCommand("network.subnet.delete", "DeleteSubnet", deleteSubnet)

// deleteSubnet implements DeleteSubnet in a transaction of the leader.
func deleteSubnet(tx *store.Tx, t cloud.Tenant, id cloud.SubnetID) (none struct{}, err error) {
	subnet, err := find(tx, subnets, kindSubnet, t, string(id))
	if err != nil {
		return none, err
	}
	users, err := listUsers(tx, portsOf, t.Project, string(id), "", kindPort)
	if err != nil {
		return none, err
	}
	if len(users) > 0 {
		return none, inUse(label(kindSubnet, subnet.Name, string(id)), users)
	}
	if err := leaveTable(tx, t, id); err != nil {
		return none, err
	}
	if err := forgetAddresses(tx, string(id)); err != nil {
		return none, err
	}
	if err := forgetAddresses6(tx, subnet); err != nil {
		return none, err
	}
	releaseVNI(tx, subnet.VNI)
	releaseName(tx, t.Project, kindSubnet, subnet.Name)
	subnetsOf.Delete(tx, string(subnet.VPC), string(id))
	subnets.Delete(tx, string(t.Project), string(id))
	return none, returnQuota(tx, t, quantity{Subnets: 1})
}

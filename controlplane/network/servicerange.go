package network

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/trivet-cloud/trivet/controlplane/network/ipam"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// serviceAt has the service IP of each assigned address of a VPC's ServiceCIDR, at service-at/<vpc>/<address>. No port
// has such an address.
var serviceAt = store.NewTable[cloud.ServiceIPID]("service-at")

// serviceSpace returns the addresses of a VPC that service IPs without a subnet can have. The first and the last
// address of the prefix are left out, because some programs take them for the network and broadcast addresses.
func serviceSpace(v *cloud.VPC) space {
	out := space{Owner: "services-" + string(v.ID)}
	if v.ServiceCIDR.IsValid() {
		out.First, out.Last = v.ServiceCIDR.Addr().Next(), cloud.Last(v.ServiceCIDR).Prev()
	}
	return out
}

// claimServiceAddress assigns an address of the VPC's ServiceCIDR to a service IP: a, or the lowest free address if a
// is the zero value.
func claimServiceAddress(tx *store.Tx, t cloud.Tenant, s *cloud.ServiceIP, a netip.Addr) error {
	vpc, err := find(tx, vpcs, kindVPC, t, string(s.VPC))
	if err != nil {
		return err
	}
	if !vpc.ServiceCIDR.IsValid() {
		return fault.Invalid("subnet_id", "is required, because %s has no service_cidr_block", vpcLabel(vpc)).
			With("constraint", "required")
	}
	addresses := serviceSpace(vpc)
	if a.IsValid() {
		if a.Less(addresses.First) || addresses.Last.Less(a) {
			return fault.Invalid("address",
				"must be from %s to %s, the service range of %s, got %s; for an address of a subnet, set subnet_id",
				addresses.First, addresses.Last, vpcLabel(vpc), a).With("constraint", "within_service_range")
		}
		err = addresses.assign(tx, a)
	} else {
		a, err = addresses.assignLowest(tx)
	}
	switch {
	case errors.Is(err, ipam.ErrAssigned):
		return fault.New(fault.AlreadyExists, "address %s of %s is in use, or was released less than %s ago", a,
			vpcLabel(vpc), RestTime).WithReason("ADDRESS_IN_USE").With("field", "address")
	case errors.Is(err, ipam.ErrFull):
		return fault.New(fault.ResourceExhausted, "no address of %s with the service_cidr_block %s is free",
			vpcLabel(vpc), vpc.ServiceCIDR).WithReason("SERVICE_RANGE_FULL")
	case err != nil:
		return fmt.Errorf("assign an address for a service IP of VPC %s: %w", vpc.ID, err)
	}
	s.Address = a
	serviceAt.Put(tx, &s.ID, string(vpc.ID), a.String())
	return nil
}

// releaseServiceAddress releases the address of a service IP without a subnet. The address can be assigned again after
// RestTime.
func releaseServiceAddress(tx *store.Tx, s *cloud.ServiceIP) error {
	vpc, err := vpcs.Get(tx, string(s.Project), string(s.VPC))
	if err != nil || vpc == nil {
		return err
	}
	serviceAt.Delete(tx, string(s.VPC), s.Address.String())
	serviceSpace(vpc).release(tx, s.Address)
	return nil
}

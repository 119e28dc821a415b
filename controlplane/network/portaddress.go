package network

import (
	"net/netip"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// addressesOfPort returns the IPv4 address of a port and its IPv6 address, if it has one.
func addressesOfPort(p *cloud.Port) []netip.Addr {
	if !p.IP6.IsValid() {
		return []netip.Addr{p.IP}
	}
	return []netip.Addr{p.IP, p.IP6}
}

// claimAddresses assigns the MAC, the IPv4 address and, if the subnet has IPv6, the IPv6 address of a new port. It
// chooses those that the port does not have yet.
func claimAddresses(tx *store.Tx, subnet *cloud.Subnet, port *cloud.Port) (err error) {
	if err := claimMAC(tx, port); err != nil {
		return err
	}
	if !port.IP.IsValid() {
		port.IP, err = assignLowestAddress(tx, subnet)
	} else if err = cloud.CheckAddress("ip_address", subnet.CIDR, port.IP); err == nil {
		err = assignAddress(tx, subnet, port.IP)
	}
	if err != nil {
		return err
	}
	return claimAddress6(tx, subnet, port)
}

// claimMAC reserves the port's MAC in its VPC. A port without a MAC gets one that is derived from its ID.
func claimMAC(tx *store.Tx, port *cloud.Port) error {
	chosen := port.MAC != cloud.MAC{}
	for attempt := uint32(0); ; attempt++ {
		if !chosen {
			port.MAC = cloud.DeriveMAC(port.ID, attempt)
		}
		taken, err := macs.Has(tx, string(port.VPC), port.MAC.String())
		switch {
		case err != nil:
			return err
		case !taken:
			macs.Put(tx, &port.ID, string(port.VPC), port.MAC.String())
			return nil
		case chosen:
			vpc, err := labelOf(tx, port.Project, kindVPC, string(port.VPC))
			if err != nil {
				return err
			}
			return fault.New(fault.AlreadyExists, "another port of %s has the MAC address %s", vpc, port.MAC).
				WithReason("MAC_IN_USE").With("field", "mac_address")
		}
	}
}

// claimAddress6 reserves the port's IPv6 address. A port without one gets one that is derived from its MAC.
func claimAddress6(tx *store.Tx, subnet *cloud.Subnet, port *cloud.Port) error {
	if !subnet.CIDR6.IsValid() {
		if port.IP6.IsValid() {
			return fault.Invalid("ipv6_address", "must be empty: the subnet has no IPv6 prefix").
				With("constraint", "within_subnet")
		}
		return nil
	}
	if !port.IP6.IsValid() {
		port.IP6 = cloud.DeriveIP6(subnet.CIDR6, port.MAC)
	}
	if err := cloud.CheckAddress("ipv6_address", subnet.CIDR6, port.IP6); err != nil {
		return err
	}
	if port.IP6 == subnet.CIDR6.Addr() || port.IP6 == subnet.CIDR6.Addr().Next() {
		return fault.Invalid(
			"ipv6_address", "must not be the subnet's router address %s or its gateway %s", subnet.CIDR6.Addr(),
			subnet.CIDR6.Addr().Next(),
		).
			With("constraint", "host_address")
	}
	taken, err := addresses6.Has(tx, string(subnet.ID), port.IP6.String())
	if err != nil {
		return err
	}
	if taken {
		return fault.New(fault.AlreadyExists, "another port of %s has the address %s, or had it less than %s ago",
			label(kindSubnet, subnet.Name, string(subnet.ID)), port.IP6, RestTime).
			WithReason("ADDRESS_IN_USE").With("field", "ipv6_address")
	}
	addresses6.Put(tx, &port.ID, string(subnet.ID), port.IP6.String())
	return nil
}

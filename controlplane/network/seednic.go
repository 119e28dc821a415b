package network

import (
	"net/netip"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// SeedNIC returns the network configuration of a guest's interface, for the seed disk. The interface is that of the
// port with an ID. The caller must set NicId. SeedNIC returns nil if the port does not exist. The values are those that
// DHCP gives.
func SeedNIC(v store.Reader, project cloud.ProjectID, id cloud.PortID) (*agentv1.AssignedSeedNic, error) {
	port, err := ports.Get(v, string(project), string(id))
	if port == nil || err != nil {
		return nil, err
	}
	subnet, err := subnets.Get(v, string(project), string(port.Subnet))
	if subnet == nil || err != nil {
		return nil, err
	}
	vpc, err := vpcs.Get(v, string(project), string(port.VPC))
	if vpc == nil || err != nil {
		return nil, err
	}
	out := &agentv1.AssignedSeedNic{
		Dhcp: subnet.DHCP, Domain: domainOf(project), Mtu: uint32(vpc.MTU),
		Addresses: []string{netip.PrefixFrom(port.IP, subnet.CIDR.Bits()).String()},
		Gateways:  []string{subnet.Gateway.String()},
	}
	if port.IP6.IsValid() {
		out.Addresses = append(out.Addresses, netip.PrefixFrom(port.IP6, subnet.CIDR6.Bits()).String())
		out.Gateways = append(out.Gateways, subnet.CIDR6.Addr().Next().String())
	}
	for _, a := range subnet.DNS {
		out.DnsServers = append(out.DnsServers, a.String())
	}
	if len(subnet.DNS) == 0 {
		out.DnsServers = out.Gateways
	}
	return out, nil
}

// domainOf returns the DNS domain of the host names of a project's VMs.
func domainOf(project cloud.ProjectID) string { return string(project) + ".internal" }

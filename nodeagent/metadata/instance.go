package metadata

import (
	"net/netip"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/cloudinit"
)

// Instance is the data that the server sends to the guest behind a port.
type Instance struct {
	// Port is the port from which the request came. Limits and tokens are per port. It must not be empty.
	Port cloud.PortID
	// ID is the ID of the VM or pod.
	ID string
	// HostName may be empty; the guest then finds no host name.
	HostName string
	// Region and Zone are the location of the guest. They may be empty.
	Region, Zone string
	// SSHKeys are lines in the format of authorized_keys.
	SSHKeys []string
	// NICs are the network interfaces in the order of their device numbers. The first is the primary interface.
	NICs []NIC
	// NoCloud are the files below /nocloud/. Its UserData is also EC2's user-data, which does not exist if it is empty.
	NoCloud cloudinit.Files
	// TokensRequired refuses requests without a session token.
	TokensRequired bool
}

// NIC is a network interface of an instance.
type NIC struct {
	Port           cloud.PortID
	MAC            cloud.MAC
	IPs            []netip.Addr // IPv4
	IP6s           []netip.Addr
	SecurityGroups []cloud.SecurityGroupID
	Subnet         cloud.SubnetID
	VPC            cloud.VPCID
	// The prefixes of the subnet and of the VPC. Those of IPv6 are invalid without IPv6.
	SubnetCIDR, SubnetCIDR6 netip.Prefix
	VPCCIDR, VPCCIDR6       netip.Prefix
}

package cloud

import (
	"net/netip"
	"time"
)

// NetworkUpdate is a change of the VPCs that a host has, or their whole state. The control plane sends it to the host's
// agent.
type NetworkUpdate struct {
	// Node is the host's own ID. Ports of this node are on the host.
	Node NodeID
	// Stream is the number of the connection on which the update arrived. It grows with each connection.
	Stream uint64
	// Began is when the agent opened that connection. The control plane has read the records of a snapshot since then.
	Began time.Time
	// Revision is the revision that the host has after it has applied the update.
	Revision int64
	// Snapshot is true if the update has all records, so that all others are to be removed.
	Snapshot bool

	// A record replaces the one with the same ID.
	VPCs        []VPCOnHost
	Subnets     []Subnet
	Ports       []PortOnHost
	Groups      []SecurityGroup
	RouteTables []RouteTable
	NATGateways []NATGatewayOnHost
	FloatingIPs []FloatingIP
	ServiceIPs  []ServiceIP
	// Protected are the addresses of the cloud's hosts and of the members of its control plane. Nil means that they have
	// not changed.
	Protected []netip.Addr
	// Encryption are the hosts with which the host exchanges encrypted VXLAN packets. Nil means that they have not
	// changed.
	Encryption []EncryptedPeer
	// Peerings are the ACTIVE peerings of which the host has both VPCs.
	Peerings []Peering
	// Deleted are the IDs of records of any kind that no longer exist. Deleting a VPC deletes its records.
	Deleted []string
	// Invalid are records that the agent cannot use.
	Invalid []InvalidRecord
}

// VPCOnHost is a VPC as its hosts need it.
type VPCOnHost struct {
	VPC
	// Domain is the DNS domain of the ports' host names, such as web.internal.
	Domain string
}

// PortOnHost is a port as the hosts of its VPC need it.
type PortOnHost struct {
	Port
	// VTEP is the underlay address of the port's host. It is invalid if the port has no host or its address is unknown.
	VTEP netip.Addr
	// HostName is the name by which other guests of the VPC find the port in DNS, without a domain. It may be empty.
	HostName string
	// BindingGeneration grows each time when the port is bound to a host.
	BindingGeneration uint64
}

// InvalidRecord is a record of a NetworkUpdate that failed a check.
type InvalidRecord struct {
	ID string
	// VPC is the VPC of the record, empty for security groups.
	VPC VPCID
	Err error
}

// NetworkAck reports which revision a host has applied.
type NetworkAck struct {
	// Stream and Revision are those of a NetworkUpdate. The host has applied it and all before it.
	Stream   uint64
	Revision int64
	// Failures are the VPCs that could not be applied completely, sorted by VPC.
	Failures []VPCFailure
}

// VPCFailure is a VPC that could not be applied completely.
type VPCFailure struct {
	VPC   VPCID
	Error string
}

package cloud

import (
	"crypto/sha256"
	"encoding/base32"
	"net/netip"
	"strings"
)

// HostPeering is the peering of a HostVPC with another VPC on the same host. The other VPC has a HostPeering with the
// same ID.
type HostPeering struct {
	ID PeeringID
	// Peer is the other VPC, with its prefixes and its MTU. CIDR6 is invalid if one of the two VPCs has no IPv6.
	Peer        VPCID
	CIDR, CIDR6 netip.Prefix
	MTU         uint16
}

// PeeringDevices is the prefix of the names of the network devices of peerings. No other device has it.
const PeeringDevices = "peer"

// Device returns the name of the network device of the peering in the namespaces of both VPCs. It has 55 bits of a hash
// of the ID, because names of devices have at most 15 bytes.
func (id PeeringID) Device() string {
	sum := sha256.Sum256([]byte(id))
	return PeeringDevices + strings.ToLower(base32.StdEncoding.EncodeToString(sum[:])[:11])
}

package cloud

import (
	"crypto/sha256"
	"encoding/binary"
	"net"
	"net/netip"
)

// Port is an address of a subnet that a device can use: a NIC of a VM, or a service IP.
type Port struct {
	ID          PortID
	Name        string
	Org         OrgID
	Project     ProjectID
	Description string
	VPC         VPCID
	Subnet      SubnetID
	// MAC is unique in the VPC.
	MAC MAC
	IP  netip.Addr
	// IP6 is invalid for a port of a subnet without IPv6.
	IP6    netip.Addr
	Groups []SecurityGroupID
	Pairs  []AddressPair
	// Secured is true if the port may send only from its own addresses and Pairs, and Groups apply.
	Secured bool
	// Mbps limits the bandwidth in each direction, in Mbit/s; 0 means no limit.
	Mbps uint32
	// Labels are compared with the selectors of service IPs.
	Labels map[string]string `cbor:",omitempty"`
	Device PortDevice
	// Owned is true if the port was created for its device and is deleted with it.
	Owned bool
	// Node is the host of the device, empty without one.
	Node NodeID
	// MigrationNode is the other host of a live migration of the device, or empty if there is no migration. This host also
	// creates the port's device and packet filter, but sends packets for the port to the host Node, as all other hosts do.
	MigrationNode NodeID `cbor:",omitempty"`
	// BindingGeneration increases each time when the port is bound to a host. A host does not announce a port with an
	// older binding.
	BindingGeneration uint64
	// HostName is the name of the port's device in DNS, without a domain. It is empty without a device.
	HostName     string
	Status       NetworkStatus
	StatusReason string
	CreatedAt    Time
	UpdatedAt    Time
}

// PortCounters count what the guest at a port has received and sent since its host made the port's device.
type PortCounters struct {
	ReceivedBytes, ReceivedPackets uint64
	SentBytes, SentPackets         uint64
}

// PortDevice is what uses a port. The zero value means that nothing does.
type PortDevice struct {
	Kind PortDeviceKind
	ID   string
}

// PortDeviceKind is the kind of a port's device, as it is in network.v1.Port.device_type.
type PortDeviceKind string

const (
	DeviceVM        PortDeviceKind = "vm"
	DeviceServiceIP PortDeviceKind = "service_ip"
)

// CheckPortLabels checks the labels of a port like CheckPairs. It also returns InvalidArgument if there are more than
// MaxPortLabels, or if their total size exceeds MaxPortLabelBytes.
func CheckPortLabels(field string, m map[string]string) error {
	if err := CheckPairs(field, m); err != nil {
		return err
	}
	if len(m) > MaxPortLabels {
		return invalid(field, "max_items", "must be at most %d, got %d", MaxPortLabels, len(m))
	}
	total := 0
	for k, v := range m {
		total += len(k) + len(v)
	}
	if total > MaxPortLabelBytes {
		return invalid(field, "max_bytes", "must have at most %d bytes together, got %d", MaxPortLabelBytes, total)
	}
	return nil
}

// ParseMAC returns the Ethernet address in s. It returns an InvalidArgument fault for another notation, and for
// addresses that a port cannot have: multicast, all zeros, and GatewayMAC.
func ParseMAC(field, s string) (MAC, error) {
	hardware, err := net.ParseMAC(s)
	if err != nil || len(hardware) != len(MAC{}) {
		return MAC{}, invalid(field, "mac", "must be an Ethernet address such as 02:00:5e:10:00:01, got %q", s)
	}
	m := MAC(hardware)
	switch {
	case m[0]&1 != 0:
		return MAC{}, invalid(field, "unicast", "must be a unicast address, got %s", m)
	case m == MAC{}:
		return MAC{}, invalid(field, "mac", "must not be all zeros")
	case m == GatewayMAC:
		return MAC{}, invalid(field, "mac", "%s is the address of every gateway", m)
	}
	return m, nil
}

// DeriveMAC returns a locally administered unicast address that depends on the port's ID and on the number of the
// attempt, in case another port has the address of the first attempt.
func DeriveMAC(id PortID, attempt uint32) MAC {
	sum := sha256.Sum256(binary.BigEndian.AppendUint32([]byte(id), attempt))
	return MAC{0x02, sum[0] & 0x7f, sum[1], sum[2], sum[3], sum[4]}
}

// DeriveIP6 returns the address of a /64 prefix whose interface identifier is derived from a MAC address (modified
// EUI-64, RFC 4291, appendix A).
func DeriveIP6(p netip.Prefix, m MAC) netip.Addr {
	a := p.Addr().As16()
	copy(a[8:], []byte{m[0] ^ 2, m[1], m[2], 0xff, 0xfe, m[3], m[4], m[5]})
	return netip.AddrFrom16(a)
}

// LinkLocal returns the link-local address that the kernel derives from a MAC address, as DeriveIP6 does.
func LinkLocal(m MAC) netip.Addr { return DeriveIP6(linkLocalPrefix, m) }

var linkLocalPrefix = netip.MustParsePrefix("fe80::/64")

// CheckAddress returns an InvalidArgument fault unless a is an address of the prefix that a port can have. Network
// address, gateway and broadcast address are refused elsewhere, because they are assigned already.
func CheckAddress(field string, p netip.Prefix, a netip.Addr) error {
	if !p.Contains(a) {
		return invalid(field, "within_subnet", "must be within the subnet %s, got %s", p, a)
	}
	return nil
}

// ParseAddr returns the IP address in s. It returns an InvalidArgument fault for another notation, a zone, and an IPv4
// address in IPv6 notation.
func ParseAddr(field, s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" || a.Is4In6() {
		return netip.Addr{}, invalid(field, "ip", "must be an IP address such as 10.0.0.5, got %q", s)
	}
	return a, nil
}

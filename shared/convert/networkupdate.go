package convert

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

// validDNSName matches a DNS name of one or more labels in lower case, except for the limit of 63 bytes of a label.
var validDNSName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$`)

// AddNetworkUpdate adds the records of a message to u. A record that a host cannot use is added to u.Invalid instead,
// so that one wrong record does not keep the others from the host. AddNetworkUpdate returns an error only for a record
// without a valid ID, because such a record cannot be attributed to a resource, for an invalid protected address, and
// for invalid keys. It does not read the message's term, revision and complete.
func AddNetworkUpdate(u *cloud.NetworkUpdate, m *agentv1.SyncNetworksResponse) error {
	var wrong []error
	invalid := func(id, vpc string, err error) {
		if idErr := cloud.CheckUUID("id", id); idErr != nil {
			wrong = append(wrong, idErr)
			return
		}
		u.Invalid = append(u.Invalid, cloud.InvalidRecord{ID: id, VPC: cloud.VPCID(vpc), Err: err})
	}
	for _, in := range m.GetVpcs() {
		v, err := VPCFrom(in.GetVpc())
		if err != nil {
			invalid(in.GetVpc().GetId(), in.GetVpc().GetId(), err)
			continue
		}
		u.VPCs = append(u.VPCs, cloud.VPCOnHost{VPC: v, Domain: dnsName(in.GetDomain())})
	}
	for _, in := range m.GetSubnets() {
		s, err := SubnetFrom(in.GetSubnet(), in.GetVni())
		if err != nil {
			invalid(in.GetSubnet().GetId(), in.GetSubnet().GetVpcId(), err)
			continue
		}
		u.Subnets = append(u.Subnets, s)
	}
	for _, in := range m.GetPorts() {
		p, err := portOnHost(in)
		if err != nil {
			invalid(in.GetPort().GetId(), in.GetPort().GetVpcId(), err)
			continue
		}
		u.Ports = append(u.Ports, p)
	}
	for _, in := range m.GetSecurityGroups() {
		g, err := SecurityGroupFrom(in)
		if err != nil {
			invalid(in.GetId(), "", err)
			continue
		}
		u.Groups = append(u.Groups, g)
	}
	for _, in := range m.GetRouteTables() {
		t, err := RouteTableFrom(in)
		if err != nil {
			invalid(in.GetId(), in.GetVpcId(), err)
			continue
		}
		u.RouteTables = append(u.RouteTables, t)
	}
	for _, in := range m.GetNatGateways() {
		n, err := NATGatewayFrom(in)
		if err != nil {
			invalid(in.GetId(), in.GetVpcId(), err)
			continue
		}
		u.NATGateways = append(u.NATGateways, cloud.NATGatewayOnHost{NATGateway: n})
	}
	for _, in := range m.GetHostNatGateways() {
		n, err := natGatewayOnHost(in)
		if err != nil {
			invalid(in.GetNatGateway().GetId(), in.GetNatGateway().GetVpcId(), err)
			continue
		}
		u.NATGateways = append(u.NATGateways, n)
	}
	for _, in := range m.GetFloatingIps() {
		f, err := FloatingIPFrom(in)
		if err != nil {
			invalid(in.GetId(), "", err)
			continue
		}
		u.FloatingIPs = append(u.FloatingIPs, f)
	}
	for _, in := range m.GetServiceIps() {
		s, err := ServiceIPFrom(in)
		if err != nil {
			invalid(in.GetId(), in.GetVpcId(), err)
			continue
		}
		u.ServiceIPs = append(u.ServiceIPs, s)
	}
	for _, in := range m.GetPeerings() {
		p, err := PeeringFrom(in)
		if err != nil {
			invalid(in.GetId(), in.GetVpcId(), err)
			continue
		}
		u.Peerings = append(u.Peerings, p)
	}
	u.Deleted = append(u.Deleted, m.GetDeleted()...)
	if m.GetProtected() != nil {
		u.Protected = []netip.Addr{}
	}
	for _, text := range m.GetProtected().GetAddresses() {
		a, err := VTEPFrom(text)
		if err != nil {
			wrong = append(wrong, fmt.Errorf("protected address: %w", err))
			continue
		}
		u.Protected = append(u.Protected, a)
	}
	if m.GetEncryption() != nil {
		u.Encryption = []cloud.EncryptedPeer{}
	}
	for _, in := range m.GetEncryption().GetPeers() {
		p, err := encryptedPeer(in)
		if err != nil {
			wrong = append(wrong, fmt.Errorf("peer %s: %w", in.GetVtep(), err))
			continue
		}
		u.Encryption = append(u.Encryption, p)
	}
	return errors.Join(wrong...)
}

// encryptedPeer converts a peer. Its errors do not contain keys.
func encryptedPeer(in *agentv1.EncryptedPeer) (p cloud.EncryptedPeer, err error) {
	if p.VTEP, err = VTEPFrom(in.GetVtep()); err != nil {
		return p, err
	}
	if p.Send, err = espState(in.GetSend()); err != nil {
		return p, err
	}
	for _, r := range in.GetReceive() {
		s, err := espState(r)
		if err != nil {
			return p, err
		}
		p.Receive = append(p.Receive, s)
	}
	return p, nil
}

func espState(in *agentv1.EspState) (s cloud.ESPState, err error) {
	s.SPI = in.GetSpi()
	if s.SPI < 256 {
		return s, fault.Invalid("spi", "must be at least 256, got %d", s.SPI)
	}
	if len(in.GetKey()) != len(s.Key) {
		return s, fault.Invalid("key", "must have %d bytes, got %d", len(s.Key), len(in.GetKey()))
	}
	copy(s.Key[:], in.GetKey())
	return s, nil
}

func portOnHost(in *agentv1.HostPort) (cloud.PortOnHost, error) {
	p, err := PortFrom(in.GetPort())
	if err != nil {
		return cloud.PortOnHost{}, err
	}
	out := cloud.PortOnHost{Port: p, HostName: dnsName(in.GetHostName()), BindingGeneration: in.GetBindingGeneration()}
	out.MigrationNode = cloud.NodeID(in.GetMigrationNodeId())
	if in.GetVtep() == "" {
		return out, nil
	}
	if out.VTEP, err = VTEPFrom(in.GetVtep()); err != nil {
		return cloud.PortOnHost{}, err
	}
	return out, nil
}

// VTEPFrom parses the underlay address of a host. It returns an InvalidArgument fault for an address that no other host
// can send to.
func VTEPFrom(text string) (netip.Addr, error) {
	a, err := cloud.ParseAddr("vtep", text)
	if err == nil && (a.IsUnspecified() || a.IsMulticast()) {
		err = fault.Invalid("vtep", "must be a unicast address, got %s", a)
	}
	return a, err
}

// dnsName returns a DNS name in lower case, or "" if s is none. A port without a name in DNS is better than no port.
func dnsName(s string) string {
	s = strings.ToLower(strings.TrimSuffix(s, "."))
	if len(s) > 253 || !validDNSName.MatchString(s) {
		return ""
	}
	for label := range strings.SplitSeq(s, ".") {
		if len(label) > 63 {
			return ""
		}
	}
	return s
}

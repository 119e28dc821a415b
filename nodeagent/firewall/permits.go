package firewall

import (
	"net/netip"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// FirstPacket is the first packet of a connection, or of an exchange of UDP packets or ICMP queries.
type FirstPacket struct {
	Source, Destination netip.Addr
	Protocol            uint8
	Port                uint16 // the destination port; 0 for protocols without ports
	ICMPType, ICMPCode  uint8
	// FromPort is true if a port with port security on this host sends the packet.
	FromPort bool
}

// Permits reports whether the packet filter of a VPC passes p. Permits does no I/O. Tests of other packages use Permits
// as the reference for the rules of a VPC.
func Permits(vpc *cloud.HostVPC, p FirstPacket) (bool, error) {
	s, err := render(vpc, &Options{})
	if err != nil {
		return false, err
	}
	return s.policy.permits(&flow{
		source: p.Source, destination: p.Destination, protocol: p.Protocol, port: p.Port,
		icmpType: p.ICMPType, icmpCode: p.ICMPCode, fromPort: p.FromPort,
	}), nil
}

package netdev

import (
	"net/netip"
	"regexp"
	"slices"
	"strconv"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// underlay are the settings of VXLAN devices that are the same for all VPCs of a host.
type underlay struct {
	vtep       netip.Addr
	port       uint16
	device     int // index, or 0 for any device
	deviceName string
	mtu        int // 0 if it is unknown
}

// overhead returns the number of bytes that VXLAN adds to a packet of the overlay: the inner Ethernet header and the
// outer VXLAN, UDP and IP headers.
func (u *underlay) overhead() int {
	if u.vtep.Is6() {
		return 14 + 8 + 8 + 40
	}
	return 14 + 8 + 8 + 20
}

const (
	minMTU, maxMTU = 1280, 65535 // 1280 is the smallest MTU of IPv6 (RFC 8200)
	maxVNI         = 1<<24 - 1
	maxFileName    = 255 // bytes
	maxAlias       = 255 // bytes
)

var (
	validPrefix = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)
	validID     = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]*$`)
	validDevice = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$`)
)

// linkLocal is the link-local address of every gateway: the EUI-64 address (RFC 4291, appendix A) of cloud.GatewayMAC.
// Router advertisements must be sent from a link-local address (RFC 4861, part 6.1.2).
var linkLocal = func() netip.Addr {
	m := cloud.GatewayMAC
	return netip.AddrFrom16([16]byte{
		0: 0xfe, 1: 0x80, 8: m[0] ^ 2, 9: m[1], 10: m[2], 11: 0xff, 12: 0xfe, 13: m[3], 14: m[4], 15: m[5],
	})
}()

// Bridge returns the name of the bridge of the subnet with a VNI.
func Bridge(vni uint32) string { return "br" + strconv.FormatUint(uint64(vni), 10) }

func vxlanOf(vni uint32) string { return "vx" + strconv.FormatUint(uint64(vni), 10) }

// render returns the wanted state of a VPC's namespace. It returns an error for states that the kernel would refuse or
// that are ambiguous.
func render(vpc *cloud.HostVPC, u underlay) (*state, error) {
	if err := check(vpc, &u); err != nil {
		return nil, err
	}
	w := newState()
	w.settings = slices.Clone(namespaceSettings)
	w.links[loopback] = link{kind: loopbackLink, up: true}
	for i := range vpc.Subnets {
		s := &vpc.Subnets[i]
		w.addSubnet(vpc, s, &u)
		for j := range s.Ports {
			w.addPort(vpc, s, &s.Ports[j])
		}
		for j := range s.Remotes {
			w.addRemote(s, &s.Remotes[j])
		}
		w.addPairs(s)
		w.addRoutes(vpc, s)
	}
	for i := range vpc.Gateways {
		w.addTransit(vpc, &vpc.Gateways[i], &u)
	}
	return w, nil
}

func (w *state) addSubnet(vpc *cloud.HostVPC, s *cloud.HostSubnet, u *underlay) {
	bridge, overlay := Bridge(s.VNI), vxlanOf(s.VNI)
	w.links[bridge] = link{
		kind: bridgeLink, mtu: int(vpc.MTU), up: true, mac: cloud.GatewayMAC,
		settings: bridgeSettings(bridge, s.CIDR6.IsValid(), hasUnknownNeighbours(s)),
	}
	w.links[overlay] = link{
		kind: vxlanLink, mtu: int(vpc.MTU), up: true, master: bridge, flags: overlayFlags,
		underlay: u.deviceName, vxlan: vxlan{vni: s.VNI, vtep: u.vtep, port: u.port, device: u.device},
		settings: portSettings(overlay),
	}
	gateways := []netip.Prefix{netip.PrefixFrom(s.Gateway, s.CIDR.Bits())}
	if s.CIDR6.IsValid() {
		gateways = append(gateways, netip.PrefixFrom(s.Gateway6(), s.CIDR6.Bits()), netip.PrefixFrom(linkLocal, 64))
	}
	for _, p := range gateways {
		w.addresses[address{bridge, p}] = true
		w.routes[address{bridge, p.Masked()}] = p.Addr()
	}
}

func (w *state) addPort(vpc *cloud.HostVPC, s *cloud.HostSubnet, p *cloud.HostPort) {
	flags := securedFlags
	if hasUnknownMACs(p) {
		flags = unknownMACsFlags
	}
	flags.hairpin = p.Hairpin
	bridge := Bridge(s.VNI)
	w.links[p.Device] = link{
		kind: portLink, mtu: int(vpc.MTU), master: bridge, alias: aliasPrefix + string(p.ID), flags: flags,
		settings: portSettings(p.Device),
	}
	w.addLimit(p)
	// A VM that migrates to this host is in Ports and in Remotes. Its frames go to the other host until it leaves Remotes.
	if !isRemote(s, p.MAC) {
		w.fdb[station{bridge, p.MAC}] = fdbEntry{device: p.Device, sticky: true}
	}
	w.addNeighbours(bridge, p.MAC, p.IP, p.IP6)
}

func (w *state) addRemote(s *cloud.HostSubnet, r *cloud.RemotePort) {
	bridge, overlay := Bridge(s.VNI), vxlanOf(s.VNI)
	w.fdb[station{bridge, r.MAC}] = fdbEntry{device: overlay, sticky: true}
	w.tunnels[station{overlay, r.MAC}] = r.VTEP
	w.addNeighbours(bridge, r.MAC, r.IP, r.IP6)
}

func (w *state) addNeighbours(bridge string, mac cloud.MAC, addrs ...netip.Addr) {
	for _, a := range addrs {
		if a.IsValid() {
			w.neighbours[neighbour{bridge, a}] = mac
		}
	}
}

func isRemote(s *cloud.HostSubnet, mac cloud.MAC) bool {
	for i := range s.Remotes {
		if s.Remotes[i].MAC == mac {
			return true
		}
	}
	return false
}

// hasUnknownMACs reports whether a port may send from MAC addresses other than its own.
func hasUnknownMACs(p *cloud.HostPort) bool {
	for _, pair := range p.Pairs {
		if pair.MAC != (cloud.MAC{}) && pair.MAC != p.MAC {
			return true
		}
	}
	return !p.Secured
}

// hasUnknownNeighbours reports whether a port of the subnet on this host may have addresses that are not in s.
func hasUnknownNeighbours(s *cloud.HostSubnet) bool {
	for i := range s.Ports {
		if !s.Ports[i].Secured || len(s.Ports[i].Pairs) > 0 {
			return true
		}
	}
	return false
}

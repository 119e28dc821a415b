package netdev

import (
	"cmp"
	"net/netip"
	"regexp"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// state is the part of a VPC's namespace that this package manages: as wanted, made by render, or as the kernel has it,
// made by kernel.read.
type state struct {
	// settings are the wanted sysctls of the namespace in the order in which they must be written. A read state has none.
	settings []sysctl
	// sysctls are the values of a read state by path below /proc/sys.
	sysctls map[string]string

	links      map[string]link
	addresses  map[address]bool
	routes     map[address]netip.Addr // connected routes (masked prefixes) to preferred source; not read from the kernel
	fdb        map[station]fdbEntry
	tunnels    map[station]netip.Addr // (VXLAN device, MAC) to VTEP; invalid if the kernel has several VTEPs
	neighbours map[neighbour]cloud.MAC
	tables     map[tableRoute]nextHop // routes of the route tables of subnets
	rules      map[tableRule]bool
}

func newState() *state {
	return &state{
		sysctls:    map[string]string{},
		links:      map[string]link{},
		addresses:  map[address]bool{},
		routes:     map[address]netip.Addr{},
		fdb:        map[station]fdbEntry{},
		tunnels:    map[station]netip.Addr{},
		neighbours: map[neighbour]cloud.MAC{},
		tables:     map[tableRoute]nextHop{},
		rules:      map[tableRule]bool{},
	}
}

// linkKind orders links by the order in which they are created.
type linkKind int

const (
	loopbackLink linkKind = iota + 1
	bridgeLink
	vxlanLink
	transitLink // VXLAN device without a bridge
	limiterLink // IFB device of a port
	portLink    // tap or veth
)

// link is a network device.
type link struct {
	kind   linkKind
	mtu    int
	up     bool
	master string // name of the bridge
	alias  string // of ports and their IFB devices: aliasPrefix and the port's ID

	mac      cloud.MAC // of bridges and transit devices
	snooping bool      // of bridges: multicast snooping
	vxlan    vxlan
	underlay string    // of VXLAN and transit devices: name of the underlay's device; not read from the kernel
	flags    portFlags // of links with a master

	bucket   bucket // of ports and IFB devices
	redirect string // of ports: name of the IFB device for packets of the guest

	settings []sysctl // wanted sysctls of the device, in their order; a read state has none
}

// vxlan are the attributes of a VXLAN device that cannot be changed after its creation.
type vxlan struct {
	vni      uint32
	vtep     netip.Addr
	port     uint16
	device   int // index of the underlay's device in its namespace, or 0
	learning bool
}

// portFlags are the attributes of a port of a bridge.
type portFlags struct {
	learning      bool
	flood         bool // unknown unicast
	multicast     bool
	broadcast     bool
	neighSuppress bool
	hairpin       bool // frames may leave through the port that they came from
}

// Flags of the ports of a bridge. A port that may have unknown MAC addresses has the flags that Linux sets by default.
var (
	overlayFlags     = portFlags{neighSuppress: true}
	securedFlags     = portFlags{multicast: true, broadcast: true}
	unknownMACsFlags = portFlags{learning: true, flood: true, multicast: true, broadcast: true}
)

// address is an address of a bridge with the length of its prefix. In connected routes it is the masked prefix.
type address struct {
	bridge string
	prefix netip.Prefix
}

// station is a MAC address in the table of a device.
type station struct {
	device string
	mac    cloud.MAC
}

// fdbEntry is a static entry in the FDB of a bridge.
type fdbEntry struct {
	device string // port of the bridge
	sticky bool
}

// neighbour is an IP address on a bridge.
type neighbour struct {
	bridge string
	addr   netip.Addr
}

// sysctl is a setting of the kernel. The path is relative to /proc/sys.
type sysctl struct{ path, value string }

func compareAddresses(a, b address) int {
	return cmp.Or(cmp.Compare(a.bridge, b.bridge), a.prefix.Compare(b.prefix))
}

func compareStations(a, b station) int {
	return cmp.Or(cmp.Compare(a.device, b.device), strings.Compare(string(a.mac[:]), string(b.mac[:])))
}

func compareNeighbours(a, b neighbour) int {
	return cmp.Or(cmp.Compare(a.bridge, b.bridge), a.addr.Compare(b.addr))
}

// Names of devices.
const (
	loopback    = "lo"
	aliasPrefix = "trivet:"
)

var (
	bridgeName  = regexp.MustCompile(`^br[0-9]{1,8}$`)
	vxlanName   = regexp.MustCompile(`^vx[0-9]{1,8}$`)
	transitName = regexp.MustCompile(`^vt[0-9]{1,8}$`)
)

// managed reports whether a device with these attributes belongs to this package. Others in the namespace, such as the
// link to a network outside, are left alone. A port is recognized by its bridge too, so that a device that somebody
// attached to a bridge by hand is removed.
func (l *link) managed(name string) bool {
	switch l.kind {
	case loopbackLink:
		return true
	case bridgeLink:
		return bridgeName.MatchString(name)
	case vxlanLink:
		return vxlanName.MatchString(name)
	case transitLink:
		return true // convertLink recognizes it by its name
	case limiterLink:
		return limiterName.MatchString(name)
	default:
		return strings.HasPrefix(l.alias, aliasPrefix) || bridgeName.MatchString(l.master) ||
			bridgeName.MatchString(name) || vxlanName.MatchString(name) || transitName.MatchString(name) ||
			limiterName.MatchString(name)
	}
}

// portID returns the ID of the port that the device belongs to.
func (l link) portID() cloud.PortID { return cloud.PortID(strings.TrimPrefix(l.alias, aliasPrefix)) }

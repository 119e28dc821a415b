package netdev

import (
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/netspace"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// read returns the managed part of the namespace, with the sysctls that want names.
func (k *kernel) read(want *state) (*state, error) {
	have := newState()
	if err := k.readLinks(have); err != nil {
		return nil, err
	}
	names := map[int]string{} // of bridges and VXLAN devices and their ports
	for name := range have.links {
		names[k.indexes[name]] = name
	}
	for _, read := range []func(*state, map[int]string) error{
		k.readAddresses, k.readRoutes, k.readRules, k.readFDB, k.readNeighbours, k.readLimits,
	} {
		if err := read(have, names); err != nil {
			return nil, err
		}
	}
	settings := want.settings
	for _, l := range want.links {
		settings = append(settings[:len(settings):len(settings)], l.settings...)
	}
	for _, s := range settings {
		value, known, err := readSysctl(s.path)
		if err != nil {
			return nil, err
		}
		if known {
			have.sysctls[s.path] = value
		}
	}
	return have, nil
}

// readLinks reads the managed devices and their indexes.
func (k *kernel) readLinks(have *state) error {
	list, err := netspace.List("devices", k.vpc.LinkList)
	if err != nil {
		return err
	}
	flags, err := netspace.List("bridge ports", k.readFlags)
	if err != nil {
		return err
	}
	names := map[int]string{}
	for _, one := range list {
		names[one.Attrs().Index] = one.Attrs().Name
	}
	for _, one := range list {
		l, name := convertLink(one), one.Attrs().Name
		l.master, l.flags = names[one.Attrs().MasterIndex], flags[one.Attrs().Index]
		if l.managed(name) {
			have.links[name] = l
			k.indexes[name] = one.Attrs().Index
		}
	}
	return nil
}

func convertLink(one netlink.Link) link {
	attrs := one.Attrs()
	l := link{kind: portLink, mtu: attrs.MTU, up: attrs.Flags&net.FlagUp != 0, alias: attrs.Alias}
	switch typed := one.(type) {
	case *netlink.Bridge:
		l.kind = bridgeLink
		copy(l.mac[:], attrs.HardwareAddr)
		l.snooping = typed.MulticastSnooping != nil && *typed.MulticastSnooping
	case *netlink.Vxlan:
		l.kind = vxlanLink
		if transitName.MatchString(attrs.Name) {
			l.kind = transitLink
			copy(l.mac[:], attrs.HardwareAddr)
		}
		vtep, _ := netip.AddrFromSlice(typed.SrcAddr)
		l.vxlan = vxlan{
			vni: uint32(typed.VxlanId), vtep: vtep, port: uint16(typed.Port), device: typed.VtepDevIndex,
			learning: typed.Learning,
		}
	case *netlink.Ifb:
		l.kind = limiterLink
	default:
		if attrs.Flags&net.FlagLoopback != 0 {
			l.kind = loopbackLink
		}
	}
	return l
}

// portFlag is a flag of a port of a bridge with its name in bridge(8).
type portFlag struct {
	name      string
	attribute int
	value     *bool
}

func (f *portFlags) fields() []portFlag {
	return []portFlag{
		{"learning", nl.IFLA_BRPORT_LEARNING, &f.learning},
		{"flood", nl.IFLA_BRPORT_UNICAST_FLOOD, &f.flood},
		{"mcast_flood", nl.IFLA_BRPORT_MCAST_FLOOD, &f.multicast},
		{"bcast_flood", nl.IFLA_BRPORT_BCAST_FLOOD, &f.broadcast},
		{"neigh_suppress", nl.IFLA_BRPORT_NEIGH_SUPPRESS, &f.neighSuppress},
		{"hairpin", nl.IFLA_BRPORT_MODE, &f.hairpin},
	}
}

// readFlags reads the flags of all ports of bridges by index. The netlink package reads only some of the flags.
func (k *kernel) readFlags() (map[int]portFlags, error) {
	messages, err := k.request(unix.RTM_GETLINK, unix.NLM_F_DUMP, nl.NewIfInfomsg(unix.AF_BRIDGE))
	if err != nil {
		return nil, err
	}
	all := map[int]portFlags{}
	for _, m := range messages {
		header := nl.DeserializeIfInfomsg(m)
		attributes, err := nl.ParseRouteAttrAsMap(m[header.Len():])
		if err != nil {
			return nil, err
		}
		info, isPort := attributes[unix.IFLA_PROTINFO|unix.NLA_F_NESTED]
		if !isPort {
			continue
		}
		values, err := nl.ParseRouteAttrAsMap(info.Value)
		if err != nil {
			return nil, err
		}
		var flags portFlags
		for _, f := range flags.fields() {
			v := values[uint16(f.attribute)].Value
			*f.value = len(v) > 0 && v[0] != 0
		}
		all[int(header.Index)] = flags
	}
	return all, nil
}

func (k *kernel) readAddresses(have *state, names map[int]string) error {
	list, err := netspace.List("addresses", func() ([]netlink.Addr, error) { return k.vpc.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return err
	}
	for _, a := range list {
		if name := names[a.LinkIndex]; have.links[name].kind == bridgeLink {
			have.addresses[address{name, prefix(a.IPNet)}] = true
		}
	}
	return nil
}

// readRoutes reads the connected routes of the main table and the tables of subnets.
func (k *kernel) readRoutes(have *state, names map[int]string) error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := netspace.List("routes", func() ([]netlink.Route, error) {
			return k.vpc.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		})
		if err != nil {
			return err
		}
		for _, r := range list {
			name := names[r.LinkIndex]
			switch {
			case isSubnetTable(r.Table) && r.Protocol == PeeringProtocol: // of package peering
			case isSubnetTable(r.Table) && r.Dst != nil:
				readTable(have, &r, names)
			case r.Table == unix.RT_TABLE_MAIN && have.links[name].kind == bridgeLink && r.Dst != nil && r.Gw == nil:
				have.routes[address{name, prefix(r.Dst)}] = netip.Addr{}
			}
		}
	}
	return nil
}

// readFDB reads the static entries of bridges and all entries of VXLAN and transit devices.
func (k *kernel) readFDB(have *state, names map[int]string) error {
	list, err := netspace.List("FDB entries", func() ([]netlink.Neigh, error) { return k.vpc.NeighList(0, unix.AF_BRIDGE) })
	if err != nil {
		return err
	}
	for _, e := range list {
		var mac cloud.MAC
		if copy(mac[:], e.HardwareAddr) != len(mac) {
			continue
		}
		device, bridge := names[e.LinkIndex], names[e.MasterIndex]
		switch {
		case e.MasterIndex != 0:
			// Permanent entries are the MAC addresses of the bridge and its ports; others are learned.
			if have.links[bridge].kind == bridgeLink && e.State == unix.NUD_NOARP {
				have.fdb[station{bridge, mac}] = fdbEntry{device: device, sticky: e.Flags&netlink.NTF_STICKY != 0}
			}
		case have.links[device].kind == vxlanLink || have.links[device].kind == transitLink:
			vtep, _ := netip.AddrFromSlice(e.IP)
			if _, several := have.tunnels[station{device, mac}]; several {
				vtep = netip.Addr{}
			}
			have.tunnels[station{device, mac}] = vtep
		}
	}
	return nil
}

// readNeighbours reads the permanent neighbours on bridges and transit devices.
func (k *kernel) readNeighbours(have *state, names map[int]string) error {
	list, err := netspace.List("neighbours", func() ([]netlink.Neigh, error) { return k.vpc.NeighList(0, netlink.FAMILY_ALL) })
	if err != nil {
		return err
	}
	for _, n := range list {
		var mac cloud.MAC
		addr, ok := netip.AddrFromSlice(n.IP)
		name := names[n.LinkIndex]
		ok = ok && n.State == unix.NUD_PERMANENT && copy(mac[:], n.HardwareAddr) == len(mac)
		if kind := have.links[name].kind; ok && (kind == bridgeLink || kind == transitLink) {
			have.neighbours[neighbour{name, addr}] = mac
		}
	}
	return nil
}

func prefix(n *net.IPNet) netip.Prefix {
	addr, _ := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(addr, bits)
}

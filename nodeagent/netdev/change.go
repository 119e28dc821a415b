package netdev

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Change is one write to the kernel. Its string is the command that an operator would type in the VPC's namespace for
// the same effect.
type Change interface {
	String() string
	// target is the device that the change is about, or "".
	target() string
	apply(*kernel) error
}

type (
	addNamespace struct{ name string }

	addBridge struct {
		name string
		mac  cloud.MAC
		mtu  int
	}
	addVXLAN struct {
		name     string
		mtu      int
		underlay string // name of the underlay's device, for String
		vxlan
	}
	deleteLinks struct{ names []string }
	setAlias    struct{ name, alias string }
	setFlags    struct {
		name string
		portFlags
	}
	setMAC struct {
		name string
		mac  cloud.MAC
	}
	setMaster struct{ name, master string }
	setMTU    struct {
		name string
		mtu  int
	}
	setSnoopingOff struct{ name string }
	setUp          struct{ name string }

	writeSetting struct{ sysctl }

	addAddress    struct{ address }
	deleteAddress struct{ address }
	addRoute      struct {
		address
		source netip.Addr
	}

	// replaceFDB writes the entry of a MAC address in the FDB of the device's bridge, that of the VXLAN device itself
	// (if vtep is valid), or both.
	replaceFDB struct {
		device string
		mac    cloud.MAC
		bridge bool
		vtep   netip.Addr
	}
	// deleteFDB deletes the entry of a MAC address in the FDB of the device's bridge, or that of the VXLAN device itself.
	deleteFDB struct {
		device  string
		mac     cloud.MAC
		overlay bool
	}
	replaceNeighbour struct {
		neighbour
		mac cloud.MAC
	}
	deleteNeighbour struct{ neighbour }
)

func (c addNamespace) target() string { return "" }
func (c addNamespace) String() string { return "ip netns add " + c.name }

// apply does nothing: createNamespace makes the namespace before there is a kernel for it.
func (c addNamespace) apply(*kernel) error { return nil }

func (c addBridge) target() string { return c.name }
func (c addBridge) String() string {
	return fmt.Sprintf("ip link add %s address %s mtu %d type bridge mcast_snooping 0", c.name, c.mac, c.mtu)
}
func (c addBridge) apply(k *kernel) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = c.name, c.mtu, c.mac[:]
	snooping := false
	return k.vpc.LinkAdd(&netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &snooping})
}

func (c addVXLAN) target() string { return c.name }
func (c addVXLAN) String() string {
	device := ""
	if c.device != 0 {
		device = " dev " + c.underlay
	}
	return fmt.Sprintf("ip link add %s mtu %d type vxlan id %d local %s%s dstport %d nolearning",
		c.name, c.mtu, c.vni, c.vtep, device, c.port)
}
func (c addVXLAN) apply(k *kernel) error { return k.createVXLAN(c) }

func (c deleteLinks) target() string        { return "" }
func (c deleteLinks) String() string        { return "ip link delete " + strings.Join(c.names, " ") }
func (c deleteLinks) apply(k *kernel) error { return k.deleteLinks(c.names) }

func (c setAlias) target() string { return c.name }
func (c setAlias) String() string { return fmt.Sprintf("ip link set %s alias %s", c.name, c.alias) }
func (c setAlias) apply(k *kernel) error {
	return k.withLink(c.name, func(l netlink.Link) error { return k.vpc.LinkSetAlias(l, c.alias) })
}

func (c setFlags) target() string { return c.name }
func (c setFlags) String() string {
	text := "bridge link set dev " + c.name
	for _, f := range c.fields() {
		text += " " + f.name + " off"
		if *f.value {
			text = strings.TrimSuffix(text, "off") + "on"
		}
	}
	return text
}
func (c setFlags) apply(k *kernel) error {
	index, err := k.index(c.name)
	if err != nil {
		return err
	}
	message := nl.NewIfInfomsg(unix.AF_BRIDGE)
	message.Index = int32(index)
	info := nl.NewRtAttr(unix.IFLA_PROTINFO|unix.NLA_F_NESTED, nil)
	for _, f := range c.fields() {
		value := uint8(0)
		if *f.value {
			value = 1
		}
		info.AddRtAttr(f.attribute, nl.Uint8Attr(value))
	}
	_, err = k.request(unix.RTM_SETLINK, unix.NLM_F_ACK, message, info)
	return err
}

func (c setMAC) target() string { return c.name }
func (c setMAC) String() string { return fmt.Sprintf("ip link set %s address %s", c.name, c.mac) }
func (c setMAC) apply(k *kernel) error {
	return k.withLink(c.name, func(l netlink.Link) error { return k.vpc.LinkSetHardwareAddr(l, c.mac[:]) })
}

func (c setMaster) target() string { return c.name }
func (c setMaster) String() string { return fmt.Sprintf("ip link set %s master %s", c.name, c.master) }
func (c setMaster) apply(k *kernel) error {
	master, err := k.index(c.master)
	if err != nil {
		return err
	}
	return k.withLink(c.name, func(l netlink.Link) error { return k.vpc.LinkSetMasterByIndex(l, master) })
}

func (c setMTU) target() string { return c.name }
func (c setMTU) String() string { return fmt.Sprintf("ip link set %s mtu %d", c.name, c.mtu) }
func (c setMTU) apply(k *kernel) error {
	return k.withLink(c.name, func(l netlink.Link) error { return k.vpc.LinkSetMTU(l, c.mtu) })
}

func (c setSnoopingOff) target() string { return c.name }
func (c setSnoopingOff) String() string {
	return fmt.Sprintf("ip link set %s type bridge mcast_snooping 0", c.name)
}
func (c setSnoopingOff) apply(k *kernel) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = c.name
	snooping := false
	return k.vpc.LinkModify(&netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &snooping})
}

func (c setUp) target() string { return c.name }
func (c setUp) String() string { return fmt.Sprintf("ip link set %s up", c.name) }
func (c setUp) apply(k *kernel) error {
	return k.withLink(c.name, func(l netlink.Link) error { return k.vpc.LinkSetUp(l) })
}

func (c writeSetting) target() string {
	parts := strings.Split(c.path, "/")
	if len(parts) != 5 || parts[3] == "all" || parts[3] == "default" {
		return ""
	}
	return parts[3] // net/ipv4/conf/DEVICE/forwarding
}
func (c writeSetting) String() string      { return fmt.Sprintf("sysctl -w %s=%s", c.path, c.value) }
func (c writeSetting) apply(*kernel) error { return writeSysctl(c.sysctl) }

func (c addAddress) target() string { return c.bridge }
func (c addAddress) String() string {
	text := fmt.Sprintf("ip address add %s dev %s", c.prefix, c.bridge)
	if c.prefix.Addr().Is6() {
		text += " nodad"
	}
	return text
}
func (c addAddress) apply(k *kernel) error {
	return k.withLink(c.bridge, func(l netlink.Link) error { return k.vpc.AddrAdd(l, netlinkAddr(c.prefix)) })
}

func (c deleteAddress) target() string { return c.bridge }
func (c deleteAddress) String() string {
	return fmt.Sprintf("ip address delete %s dev %s", c.prefix, c.bridge)
}
func (c deleteAddress) apply(k *kernel) error {
	err := k.withLink(c.bridge, func(l netlink.Link) error { return k.vpc.AddrDel(l, netlinkAddr(c.prefix)) })
	return ignoreAbsent(err)
}

func (c addRoute) target() string { return c.bridge }
func (c addRoute) String() string {
	return fmt.Sprintf("ip route replace %s dev %s proto kernel src %s", c.prefix, c.bridge, c.source)
}
func (c addRoute) apply(k *kernel) error {
	index, err := k.index(c.bridge)
	if err != nil {
		return err
	}
	route := &netlink.Route{LinkIndex: index, Dst: netlinkPrefix(c.prefix), Protocol: unix.RTPROT_KERNEL}
	if c.prefix.Addr().Is4() {
		route.Scope, route.Src = netlink.SCOPE_LINK, c.source.AsSlice()
	} else {
		route.Priority = 256 // IP6_RT_PRIO_ADDRCONF, the metric of the routes that the kernel makes
	}
	return k.vpc.RouteReplace(route)
}

func (c replaceFDB) target() string { return c.device }
func (c replaceFDB) String() string {
	text := fmt.Sprintf("bridge fdb replace %s dev %s", c.mac, c.device)
	if c.vtep.IsValid() {
		text += fmt.Sprintf(" dst %s self", c.vtep)
	}
	if c.bridge {
		text += " master"
	}
	return text + " static sticky"
}
func (c replaceFDB) apply(k *kernel) error {
	index, err := k.index(c.device)
	if err != nil {
		return err
	}
	entry := &netlink.Ndmsg{
		Family: unix.AF_BRIDGE, Index: uint32(index), State: unix.NUD_NOARP | unix.NUD_REACHABLE, Flags: netlink.NTF_STICKY,
	}
	data := []nl.NetlinkRequestData{entry, nl.NewRtAttr(unix.NDA_LLADDR, c.mac[:])}
	if c.bridge {
		entry.Flags |= unix.NTF_MASTER
	}
	if c.vtep.IsValid() {
		entry.Flags |= unix.NTF_SELF
		data = append(data, nl.NewRtAttr(unix.NDA_DST, c.vtep.AsSlice()))
	}
	_, err = k.request(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE|unix.NLM_F_ACK, data...)
	return err
}

func (c deleteFDB) target() string { return c.device }
func (c deleteFDB) String() string {
	table := "master"
	if c.overlay {
		table = "self"
	}
	return fmt.Sprintf("bridge fdb delete %s dev %s %s", c.mac, c.device, table)
}
func (c deleteFDB) apply(k *kernel) error {
	index, err := k.index(c.device)
	if err != nil {
		return err
	}
	entry := &netlink.Ndmsg{Family: unix.AF_BRIDGE, Index: uint32(index), Flags: unix.NTF_MASTER}
	if c.overlay {
		entry.Flags = unix.NTF_SELF
	}
	_, err = k.request(unix.RTM_DELNEIGH, unix.NLM_F_ACK, entry, nl.NewRtAttr(unix.NDA_LLADDR, c.mac[:]))
	return ignoreAbsent(err)
}

func (c replaceNeighbour) target() string { return c.bridge }
func (c replaceNeighbour) String() string {
	return fmt.Sprintf("ip neighbour replace %s lladdr %s dev %s nud permanent", c.addr, c.mac, c.bridge)
}
func (c replaceNeighbour) apply(k *kernel) error {
	index, err := k.index(c.bridge)
	if err != nil {
		return err
	}
	return k.vpc.NeighSet(&netlink.Neigh{
		LinkIndex: index, IP: c.addr.AsSlice(), HardwareAddr: c.mac[:], State: unix.NUD_PERMANENT,
	})
}

func (c deleteNeighbour) target() string { return c.bridge }
func (c deleteNeighbour) String() string {
	return fmt.Sprintf("ip neighbour delete %s dev %s", c.addr, c.bridge)
}
func (c deleteNeighbour) apply(k *kernel) error {
	index, err := k.index(c.bridge)
	if err != nil {
		return err
	}
	return ignoreAbsent(k.vpc.NeighDel(&netlink.Neigh{LinkIndex: index, IP: c.addr.AsSlice()}))
}

// ignoreAbsent returns nil for the errors of deleting an address, a route or an entry that does not exist. The kernel
// deletes some as an effect of other changes: turning IPv6 off deletes a bridge's IPv6 addresses and neighbours.
func ignoreAbsent(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EADDRNOTAVAIL) ||
		errors.Is(err, unix.ESRCH) { // the error for routes
		return nil
	}
	return err
}

func netlinkPrefix(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// netlinkAddr returns an address for a device. IPv6 addresses are usable at once, without duplicate address detection.
func netlinkAddr(p netip.Prefix) *netlink.Addr {
	a := &netlink.Addr{IPNet: netlinkPrefix(p)}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	return a
}

package peering

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/netspace"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// deviceMAC is the MAC address of the devices of all peerings.
var deviceMAC = net.HardwareAddr{0x02, 0xff, 0, 0, 0, 2}

// aliasPrefix precedes the ID of the peering in the alias of a device.
const aliasPrefix = "peering:"

// links returns the devices of the namespace by name.
func (s *space) links() (map[string]netlink.Link, error) {
	list, err := netspace.List("devices", s.LinkList)
	if err != nil {
		return nil, err
	}
	byName := map[string]netlink.Link{}
	for _, l := range list {
		byName[l.Attrs().Name] = l
	}
	return byName, nil
}

func (s *space) deleteLink(l netlink.Link) error {
	if err := s.LinkDel(l); err != nil && !netspace.Absent(err) {
		return fmt.Errorf("delete device %s: %w", l.Attrs().Name, err)
	}
	s.changed("ip link delete %s", l.Attrs().Name)
	return nil
}

// deleteObsolete deletes the devices of peerings that vpc does not have.
func (s *space) deleteObsolete(vpc *cloud.HostVPC, links map[string]netlink.Link) error {
	for name, l := range links {
		device := func(p cloud.HostPeering) bool { return p.ID.Device() == name }
		if !strings.HasPrefix(name, cloud.PeeringDevices) || slices.ContainsFunc(vpc.Peerings, device) {
			continue
		}
		if err := s.deleteLink(l); err != nil {
			return err
		}
		delete(links, name)
	}
	return nil
}

// connect makes the pair of a peering, if both namespaces exist, and sets up the device in the namespace s of vpc.
func (l *Links) connect(s *space, vpc *cloud.HostVPC, p *cloud.HostPeering, links map[string]netlink.Link) error {
	mtu := int(min(vpc.MTU, p.MTU))
	have, err := l.pair(s, p, links[p.ID.Device()], mtu)
	if err != nil || have == nil {
		return err
	}
	name := p.ID.Device()
	if alias := aliasPrefix + string(p.ID); have.Attrs().Alias != alias {
		if err := s.LinkSetAlias(have, alias); err != nil {
			return fmt.Errorf("set the alias of %s: %w", name, err)
		}
		s.changed("ip link set %s alias %s", name, alias)
	}
	if have.Attrs().MTU != mtu {
		if err := s.LinkSetMTU(have, mtu); err != nil {
			return fmt.Errorf("set the MTU of %s: %w", name, err)
		}
		s.changed("ip link set %s mtu %d", name, mtu)
	}
	if have.Attrs().RawFlags&unix.IFF_NOARP == 0 {
		if err := s.LinkSetARPOff(have); err != nil {
			return fmt.Errorf("turn ARP off on %s: %w", name, err)
		}
		s.changed("ip link set %s arp off", name)
	}
	if err := s.setSettings(settings(name, p.CIDR6.IsValid())); err != nil {
		return err
	}
	if have.Attrs().Flags&net.FlagUp == 0 {
		if err := s.LinkSetUp(have); err != nil {
			return fmt.Errorf("set device %s up: %w", name, err)
		}
		s.changed("ip link set %s up", name)
	}
	return nil
}

// pair returns the device of a peering in the namespace s. It makes the pair if have, which may be nil, is not one end
// of it. It returns nil if the peer has no namespace.
func (l *Links) pair(s *space, p *cloud.HostPeering, have netlink.Link, mtu int) (netlink.Link, error) {
	select {
	case <-l.making:
		defer func() { l.making <- struct{}{} }()
	case <-s.ctx.Done():
		return nil, s.ctx.Err()
	}
	peer, err := openSpace(s.ctx, l.path(p.Peer), s.result)
	if errors.Is(err, fs.ErrNotExist) {
		if have != nil {
			err = s.deleteLink(have)
			return nil, err
		}
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer peer.Close()
	name := p.ID.Device()
	// The peer's Set may have made or replaced the pair since have was read.
	have, err = s.find(name)
	if err != nil {
		return nil, err
	}
	other, err := peer.find(name)
	if err != nil {
		return nil, err
	}
	if have != nil && other != nil && isPair(have, other) {
		return have, nil
	}
	if have != nil {
		if err := s.deleteLink(have); err != nil {
			return nil, err
		}
		// Deleting one end of a pair deletes the other.
		if other, err = peer.find(name); err != nil {
			return nil, err
		}
	}
	if other != nil {
		if err := peer.deleteLink(other); err != nil {
			return nil, err
		}
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = name, mtu, deviceMAC
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerMTU, veth.PeerHardwareAddr = name, uint32(mtu), deviceMAC
	veth.PeerNamespace = netlink.NsFd(peer.NS)
	if err := s.LinkAdd(veth); err != nil {
		return nil, fmt.Errorf("make the veth pair %s: %w", name, err)
	}
	s.changed("ip link add %s address %s mtu %d type veth peer %[1]s address %[2]s mtu %[3]d netns %[4]s",
		name, deviceMAC, mtu, peer.Path)
	s.result.Connected = append(s.result.Connected, p.Peer)
	return s.LinkByName(name)
}

// find returns the device with a name, or nil if there is none.
func (s *space) find(name string) (netlink.Link, error) {
	l, err := s.LinkByName(name)
	switch {
	case err == nil:
		return l, nil
	case netspace.Absent(err):
		return nil, nil
	}
	return nil, fmt.Errorf("find device %s: %w", name, err)
}

// isPair reports whether two devices of different namespaces are the two ends of a veth pair of a peering.
func isPair(a, b netlink.Link) bool {
	return a.Type() == "veth" && b.Type() == "veth" && a.Attrs().ParentIndex == b.Attrs().Index &&
		b.Attrs().ParentIndex == a.Attrs().Index && slices.Equal(a.Attrs().HardwareAddr, deviceMAC) &&
		slices.Equal(b.Attrs().HardwareAddr, deviceMAC)
}

// settings returns the sysctls of a device. The device has no IPv6 addresses, but forwards IPv6 packets.
func settings(name string, ipv6 bool) []netspace.Setting {
	v4, v6 := "net/ipv4/conf/"+name, "net/ipv6/conf/"+name
	disabled := "1"
	if ipv6 {
		disabled = "0"
	}
	return []netspace.Setting{
		{Path: v4 + "/forwarding", Value: "1"},
		{Path: v4 + "/rp_filter", Value: "0"},
		{Path: v4 + "/send_redirects", Value: "0"},
		{Path: v4 + "/accept_redirects", Value: "0"},
		{Path: v6 + "/addr_gen_mode", Value: "1"}, // none
		{Path: v6 + "/accept_ra", Value: "0"},
		{Path: v6 + "/autoconf", Value: "0"},
		{Path: v6 + "/accept_redirects", Value: "0"},
		{Path: v6 + "/forwarding", Value: "1"},
		{Path: v6 + "/disable_ipv6", Value: disabled},
	}
}

package edge

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/trivet-cloud/trivet/nodeagent/netspace"
	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

const (
	aliasPrefix = "trivet:" // before the path of a VPC's namespace, or the name of an external network
	aliasDevice = "#"       // between that path and the name of a gateway's device
	maxAlias    = 255       // bytes
	maxDevice   = 15        // bytes of the name of a device
	// linkMTU is the MTU of veth pairs, the largest one: the devices at both ends of the path have the smaller MTUs.
	linkMTU = 65535
	// linkCount is the number of pairs of addresses in linkPrefix.
	linkCount = 1 << 15
)

var (
	// linkPrefix has the addresses of veth pairs (RFC 3927). They are used only between the two namespaces.
	linkPrefix   = netip.MustParsePrefix("169.254.0.0/16")
	linkName     = regexp.MustCompile(`^v[0-9]{1,5}$`)
	externalName = regexp.MustCompile(`^x[0-9a-f]{8}$`)
)

// addressesOf returns the two addresses of a veth pair: in the edge namespace, and in the VPC's.
func addressesOf(number int) (near, far netip.Addr) {
	n := 2 * number
	near = netip.AddrFrom4([4]byte{169, 254, byte(n >> 8), byte(n)})
	return near, near.Next()
}

// usableNumber reports whether a number is not reserved: RFC 3927 reserves the first and the last 256 addresses, and
// clouds have services in 169.254.169.0/24.
func usableNumber(number int) bool {
	third := 2 * number >> 8
	return number >= 0 && number < linkCount && third != 0 && third != 255 && third != 169
}

// numberOf returns an unused number for the connection with an ID.
func numberOf(id string, used map[int]bool) (int, error) {
	h := fnv.New32a()
	h.Write([]byte(id))
	for i := range linkCount {
		if n := (int(h.Sum32()) + i) % linkCount; usableNumber(n) && !used[n] {
			return n, nil
		}
	}
	return 0, errors.New("all link-local addresses are in use")
}

// numbers gives each connection a number: that of its existing veth pair, or a new one. The second of two pairs with
// one namespace has no connection and is deleted later.
func numbers(connected []*connection, links map[string]netlink.Link) error {
	used, existing := map[int]bool{}, map[string]int{}
	for name, l := range links {
		n, err := strconv.Atoi(strings.TrimPrefix(name, "v"))
		if !linkName.MatchString(name) || err != nil {
			continue
		}
		used[n] = true
		if other, twice := existing[l.Attrs().Alias]; usableNumber(n) && (!twice || n < other) {
			existing[l.Attrs().Alias] = n
		}
	}
	for _, c := range connected {
		n, exists := existing[c.alias()]
		if !exists {
			var err error
			if n, err = numberOf(string(c.ID)+c.inner(), used); err != nil {
				return err
			}
			used[n] = true
		}
		c.number = n
		c.near, c.far = addressesOf(n)
	}
	return nil
}

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

func (s *space) setUp(l netlink.Link) error {
	if l.Attrs().Flags&net.FlagUp != 0 {
		return nil
	}
	if err := s.LinkSetUp(l); err != nil {
		return fmt.Errorf("set device %s up: %w", l.Attrs().Name, err)
	}
	s.changed("ip link set %s up", l.Attrs().Name)
	return nil
}

// setExternal makes the device of an external network.
func (a *application) setExternal(x *external, links map[string]netlink.Link) error {
	parent, err := a.host.LinkByName(x.Interface)
	if err != nil {
		return fmt.Errorf("find interface %s: %w", x.Interface, err)
	}
	mac := x.macOf(parent.Attrs().HardwareAddr, a.edge.Path)
	have, exists := links[x.device]
	if exists {
		typed, isMacvlan := have.(*netlink.Macvlan)
		if isMacvlan && typed.Mode == netlink.MACVLAN_MODE_BRIDGE && typed.ParentIndex == parent.Attrs().Index &&
			typed.HardwareAddr.String() == mac.String() && typed.Alias == aliasPrefix+x.name {
			return a.edge.setUp(have)
		}
		if err := a.edge.deleteLink(have); err != nil {
			return err
		}
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex, attrs.HardwareAddr = x.device, parent.Attrs().Index, mac
	attrs.Namespace = netlink.NsFd(a.edge.NS)
	if err := a.host.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE}); err != nil {
		return fmt.Errorf("make a macvlan device on %s (neither the loopback device nor a bridge port can have one): %w",
			x.Interface, err)
	}
	a.edge.changed("ip link add %s link %s address %s type macvlan mode bridge", x.device, x.Interface, mac)
	made, err := a.edge.LinkByName(x.device)
	if err != nil {
		return err
	}
	if err := a.edge.LinkSetAlias(made, aliasPrefix+x.name); err != nil {
		return err
	}
	return a.edge.setUp(made)
}

// setLink makes the veth pair of a connection.
func (a *application) setLink(c *connection, links map[string]netlink.Link) error {
	inside, err := c.inside.links()
	if err != nil {
		return err
	}
	near, exists := links[c.device()]
	far, existsInside := inside[c.inner()]
	if exists && existsInside && near.Type() == "veth" && far.Type() == "veth" &&
		near.Attrs().ParentIndex == far.Attrs().Index && far.Attrs().ParentIndex == near.Attrs().Index &&
		near.Attrs().Alias == c.alias() {
		return errors.Join(a.edge.setUp(near), c.inside.setUp(far))
	}
	if exists {
		if err := a.edge.deleteLink(near); err != nil {
			return err
		}
	}
	if existsInside {
		if err := c.inside.deleteLink(far); err != nil {
			return err
		}
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = c.device(), linkMTU
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerMTU, veth.PeerNamespace = c.inner(), linkMTU, netlink.NsFd(c.inside.NS)
	if err := a.edge.LinkAdd(veth); err != nil {
		return fmt.Errorf("make the veth pair %s: %w", c.device(), err)
	}
	a.edge.changed("ip link add %s mtu %d type veth peer %s netns %s", c.device(), linkMTU, c.inner(), c.Namespace)
	for _, end := range []struct {
		space *space
		name  string
	}{{a.edge, c.device()}, {c.inside, c.inner()}} {
		made, err := end.space.LinkByName(end.name)
		if err != nil {
			return err
		}
		if end.space == a.edge {
			if err := a.edge.LinkSetAlias(made, c.alias()); err != nil {
				return err
			}
		}
		if err := end.space.setUp(made); err != nil {
			return err
		}
	}
	return nil
}

// deleteObsolete deletes the devices of VPCs and external networks that are not wanted. It returns the paths of the
// namespaces of these VPCs that still exist.
func (s *space) deleteObsolete(links map[string]netlink.Link, wanted map[string]bool) ([]string, error) {
	var paths []string
	for name, l := range links {
		if wanted[name] || !linkName.MatchString(name) && !externalName.MatchString(name) {
			continue
		}
		if err := s.deleteLink(l); err != nil {
			return paths, err
		}
		path, _, _ := strings.Cut(strings.TrimPrefix(l.Attrs().Alias, aliasPrefix), aliasDevice)
		if mounted, err := nsthread.Exists(path); err == nil && mounted && linkName.MatchString(name) {
			paths = append(paths, path)
		} else if err != nil && !errors.Is(err, os.ErrNotExist) {
			return paths, err
		}
	}
	return paths, nil
}

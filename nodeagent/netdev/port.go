package netdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// OpenTap makes the tap of a port and attaches it to the bridge of its subnet, down. The VPC must be prepared. The
// descriptor is for a virtual machine: it has packets with a header of virtio-net (IFF_VNET_HDR). The tap disappears
// when the last copy of the descriptor is closed.
//
// OpenTap returns an error that wraps EBUSY if another process has the tap open. An existing tap that no process has
// open is used.
func (h *Host) OpenTap(ctx context.Context, vpc cloud.HostVPC, id cloud.PortID) (*os.File, error) {
	var tap *os.File
	err := h.addPort(ctx, &vpc, id, func(k *kernel, p *cloud.HostPort) error {
		var err error
		tap, err = openTap(p.Device)
		return err
	})
	if err != nil {
		if tap != nil {
			tap.Close() // which deletes the device
		}
		return nil, fmt.Errorf("open tap of port %s: %w", id, err)
	}
	return tap, nil
}

// openTap makes a tap in the namespace of the thread.
func openTap(name string) (*os.File, error) {
	request, err := unix.NewIfreq(name)
	if err != nil {
		return nil, err
	}
	request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	const path = "/dev/net/tun"
	// The descriptor can be polled only after TUNSETIFF, so os.NewFile follows the ioctl.
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("make tap %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Endpoint is the place of a container's network device.
type Endpoint struct {
	// Namespace is the path of the container's network namespace.
	Namespace string
	// Device is the name of the device there, such as eth0.
	Device string
}

// AttachVeth makes the veth pair of a port, with one end at the bridge of its subnet, down, and the other in the
// endpoint's namespace. The endpoint's device is up and has the port's MAC address, MTU, addresses and default routes,
// so a container needs no DHCP client. The VPC must be prepared. An existing device of the port is replaced.
func (h *Host) AttachVeth(ctx context.Context, vpc cloud.HostVPC, id cloud.PortID, e Endpoint) error {
	if err := h.attachVeth(ctx, &vpc, id, e); err != nil {
		return fmt.Errorf("attach port %s to %s: %w", id, e.Namespace, err)
	}
	return nil
}

func (h *Host) attachVeth(ctx context.Context, vpc *cloud.HostVPC, id cloud.PortID, e Endpoint) error {
	peer, err := netns.GetFromPath(e.Namespace)
	if err != nil {
		return fmt.Errorf("open namespace: %w", err)
	}
	defer peer.Close()
	handle, err := openHandle(peer)
	if err != nil {
		return err
	}
	defer handle.Close()
	made := ""
	err = h.addPort(ctx, vpc, id, func(k *kernel, p *cloud.HostPort) error {
		if err := k.deleteLinks([]string{p.Device}); err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU = p.Device, int(vpc.MTU)
		veth := netlink.NewVeth(attrs)
		veth.PeerName, veth.PeerNamespace = e.Device, netlink.NsFd(peer)
		veth.PeerHardwareAddr, veth.PeerMTU = p.MAC[:], uint32(vpc.MTU)
		if err := k.vpc.LinkAdd(veth); err != nil {
			return fmt.Errorf("make veth pair %s: %w", p.Device, err)
		}
		made = p.Device
		return nil
	})
	if err == nil {
		s, p, _ := findPort(vpc, id) // addPort found it
		err = configureEndpoint(handle, e.Device, s, p)
	}
	if err != nil && made != "" {
		return errors.Join(err, h.Detach(context.WithoutCancel(ctx), vpc.ID, id))
	}
	return err
}

// configureEndpoint sets a container's device up and gives it the port's addresses and routes.
func configureEndpoint(handle *netlink.Handle, device string, s *cloud.HostSubnet, p *cloud.HostPort) error {
	l, err := handle.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find %s: %w", device, err)
	}
	if err := handle.LinkSetUp(l); err != nil {
		return fmt.Errorf("set %s up: %w", device, err)
	}
	add := func(a netip.Addr, bits int, gateway netip.Addr) error {
		if !a.IsValid() {
			return nil
		}
		if err := handle.AddrAdd(l, netlinkAddr(netip.PrefixFrom(a, bits))); err != nil {
			return fmt.Errorf("add address %s: %w", a, err)
		}
		all := netip.PrefixFrom(gateway, 0).Masked()
		route := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: netlinkPrefix(all), Gw: gateway.AsSlice()}
		if err := handle.RouteAdd(route); err != nil {
			return fmt.Errorf("add default route via %s: %w", gateway, err)
		}
		return nil
	}
	if err := add(p.IP, s.CIDR.Bits(), s.Gateway); err != nil {
		return err
	}
	return add(p.IP6, s.CIDR6.Bits(), s.Gateway6())
}

// addPort calls create, which makes the device of a port in the VPC's namespace, and attaches the device to the bridge.
func (h *Host) addPort(
	ctx context.Context, vpc *cloud.HostVPC, id cloud.PortID, create func(*kernel, *cloud.HostPort) error,
) error {
	s, p, err := findPort(vpc, id)
	if err != nil {
		return err
	}
	if err := checkPort(p, uses{}); err != nil {
		return err
	}
	unlock, err := h.lock(ctx, vpc.ID)
	if err != nil {
		return err
	}
	defer unlock()
	return h.enter(ctx, vpc.ID, func(k *kernel) error {
		// Without the bridge the VPC is not prepared, or not with this subnet.
		if _, err := k.index(Bridge(s.VNI)); err != nil {
			return fmt.Errorf("find bridge %s of subnet %s: %w", Bridge(s.VNI), s.ID, err)
		}
		if err := create(k, p); err != nil {
			return err
		}
		// Only this port is planned, from an empty state, so that the time does not depend on the number of ports.
		want, have := newState(), newState()
		want.addPort(vpc, s, p)
		have.links[p.Device] = link{kind: portLink}
		// The port's IFB device may exist, because it does not end with a tap.
		limiter := limiterOf(p)
		if w, wanted := want.links[limiter]; wanted && k.exists(limiter) {
			have.links[limiter] = w
		}
		changes, _ := plan(want, have)
		_, vanished, err := k.apply(changes, want)
		if err == nil && len(vanished) > 0 {
			err = fmt.Errorf("device %s was deleted meanwhile", p.Device)
		}
		return err
	})
}

// ActivatePort sets the device of one port up, as Activate does for all ports. It reads only this device, so its
// duration does not depend on the number of ports. It returns nil without a change if the device does not exist or is
// not that of the port.
func (h *Host) ActivatePort(ctx context.Context, vpc cloud.HostVPC, id cloud.PortID) error {
	if err := h.activatePort(ctx, &vpc, id); err != nil {
		return fmt.Errorf("activate port %s: %w", id, err)
	}
	return nil
}

func (h *Host) activatePort(ctx context.Context, vpc *cloud.HostVPC, id cloud.PortID) error {
	s, p, err := findPort(vpc, id)
	if err != nil {
		return err
	}
	unlock, err := h.lock(ctx, vpc.ID)
	if err != nil {
		return err
	}
	defer unlock()
	return h.enter(ctx, vpc.ID, func(k *kernel) error {
		device, err := k.vpc.LinkByName(p.Device)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("find %s: %w", p.Device, err)
		}
		bridge, err := k.index(Bridge(s.VNI))
		if err != nil {
			return fmt.Errorf("find bridge %s of subnet %s: %w", Bridge(s.VNI), s.ID, err)
		}
		want, have := newState(), newState()
		want.addPort(vpc, s, p)
		l := convertLink(device)
		if device.Attrs().MasterIndex == bridge {
			l.master = Bridge(s.VNI)
		}
		have.links[p.Device] = l
		changes, _ := planActivation(want, have)
		_, _, err = k.apply(changes, want)
		return err
	})
}

func findPort(vpc *cloud.HostVPC, id cloud.PortID) (*cloud.HostSubnet, *cloud.HostPort, error) {
	for i := range vpc.Subnets {
		s := &vpc.Subnets[i]
		for j := range s.Ports {
			if s.Ports[j].ID == id {
				return s, &s.Ports[j], nil
			}
		}
	}
	return nil, nil, fmt.Errorf("VPC %s has no such port on this host", vpc.ID)
}

// Detach deletes the device of a port. A port without a device and a VPC without a namespace are no errors.
func (h *Host) Detach(ctx context.Context, vpc cloud.VPCID, id cloud.PortID) error {
	if err := h.detach(ctx, vpc, id); err != nil {
		return fmt.Errorf("detach port %s: %w", id, err)
	}
	return nil
}

func (h *Host) detach(ctx context.Context, vpc cloud.VPCID, id cloud.PortID) error {
	unlock, err := h.lock(ctx, vpc)
	if err != nil {
		return err
	}
	defer unlock()
	mounted, err := nsthread.Exists(h.Path(vpc))
	if !mounted && (err == nil || errors.Is(err, fs.ErrNotExist)) {
		return nil
	}
	if err != nil {
		return err
	}
	return h.enter(ctx, vpc, func(k *kernel) error {
		have := newState()
		if err := k.readLinks(have); err != nil {
			return err
		}
		var names []string
		for _, name := range have.linksInOrder() {
			if have.links[name].alias == aliasPrefix+string(id) {
				names = append(names, name)
			}
		}
		return k.deleteLinks(names)
	})
}

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"
)

// underlay is the network that connects the hosts, as this host sees it.
type underlay struct {
	vtep netip.Addr
	mtu  uint32
	// device is the interface that overlay packets must use. It is empty if the host's routes decide.
	device string
}

// String describes the underlay in log messages and errors.
func (u underlay) String() string {
	text := fmt.Sprintf("%s with an MTU of %d", u.vtep, u.mtu)
	if u.device != "" {
		text += " on " + u.device
	}
	return text
}

// findUnderlay returns the underlay that the configuration names: an interface, or the address of one. Without a
// setting it is the address from which the host sends to the first member of the control plane that has a route.
func findUnderlay(ctx context.Context, c *Config) (underlay, error) {
	var u underlay
	var err error
	if c.Underlay == "" {
		u.vtep, err = addressTowards(ctx, c.ControlPlane)
	} else if u.vtep, err = netip.ParseAddr(c.Underlay); err != nil {
		u.device = c.Underlay
		u.vtep, err = addressOfDevice(c.Underlay)
	}
	if err != nil {
		return u, err
	}
	return withMTU(c, u)
}

// withMTU returns u with its present MTU: the setting, or that of the interface with the address.
func withMTU(c *Config, u underlay) (underlay, error) {
	var err error
	if u.mtu = c.UnderlayMTU; u.mtu == 0 {
		u.mtu, err = mtuOf(u.vtep)
	}
	return u, err
}

// addressTowards returns the address from which this host sends to the first of the members that can be resolved and
// has a route. It sends nothing, except that it may look up names.
func addressTowards(ctx context.Context, members []string) (netip.Addr, error) {
	var all []error
	var dialer net.Dialer
	for _, member := range members {
		conn, err := dialer.DialContext(ctx, "udp", member)
		if err != nil {
			all = append(all, err)
			continue
		}
		addr := conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
		conn.Close()
		return addr.WithZone(""), nil
	}
	err := errors.Join(all...)
	return netip.Addr{}, fmt.Errorf("find the address that leads to the control plane; set underlay: %w", err)
}

// resolveTimeout limits how long memberAddresses looks up names.
const resolveTimeout = 5 * time.Second

// memberAddresses returns the addresses of members of the control plane, which are given as host:port. If some names
// cannot be resolved within resolveTimeout, it returns an error and the addresses of the other members.
func memberAddresses(ctx context.Context, members []string) (out []netip.Addr, err error) {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	var wrong []error
	for _, member := range members {
		host, _, err := net.SplitHostPort(member)
		if err != nil {
			wrong = append(wrong, err)
			continue
		}
		found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		if err != nil {
			wrong = append(wrong, err)
			continue
		}
		for _, a := range found {
			if a = a.Unmap().WithZone(""); !slices.Contains(out, a) {
				out = append(out, a)
			}
		}
	}
	return out, errors.Join(wrong...)
}

// addressOfDevice returns the first IPv4 address of an interface, or the first IPv6 address if it has no IPv4 address.
// It ignores link-local addresses.
func addressOfDevice(name string) (netip.Addr, error) {
	device, err := net.InterfaceByName(name)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("underlay: %q is neither an IP address nor an interface of this host: %w", name, err)
	}
	addrs, err := addressesOf(device)
	if err != nil {
		return netip.Addr{}, err
	}
	addrs = slices.DeleteFunc(addrs, netip.Addr.IsLinkLocalUnicast)
	slices.SortStableFunc(addrs, func(a, b netip.Addr) int { return a.BitLen() - b.BitLen() })
	if len(addrs) == 0 {
		return netip.Addr{}, fmt.Errorf("underlay: the interface %s has no address that other hosts can reach", name)
	}
	return addrs[0], nil
}

// mtuOf returns the MTU of the interface that has an address.
func mtuOf(addr netip.Addr) (uint32, error) {
	devices, err := net.Interfaces()
	if err != nil {
		return 0, fmt.Errorf("underlay: %w", err)
	}
	for i := range devices {
		addrs, err := addressesOf(&devices[i])
		if err == nil && slices.Contains(addrs, addr) {
			return uint32(devices[i].MTU), nil
		}
	}
	return 0, fmt.Errorf("underlay: no interface of this host has the address %s", addr)
}

func addressesOf(device *net.Interface) ([]netip.Addr, error) {
	list, err := device.Addrs()
	if err != nil {
		return nil, fmt.Errorf("read the addresses of %s: %w", device.Name, err)
	}
	var out []netip.Addr
	for _, a := range list {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			out = append(out, prefix.Addr().Unmap())
		}
	}
	return out, nil
}

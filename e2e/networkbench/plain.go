package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// plainBridge is a network namespace with a bridge, br0, as an operator makes it by hand: no packet filter, no
// connection tracking.
type plainBridge struct {
	name string // of the namespace
}

// newPlainBridge makes a namespace, whose name begins with prefix, with a bridge.
func newPlainBridge(ctx context.Context, name string) (*plainBridge, error) {
	p := &plainBridge{prefix + name}
	if err := commands(ctx, "ip netns add "+p.name); err != nil {
		return nil, err
	}
	return p, p.addBridge(ctx)
}

// addBridge makes the bridge in the namespace.
func (p *plainBridge) addBridge(ctx context.Context) error {
	if err := commands(ctx,
		fmt.Sprintf("ip -n %s link add br0 mtu 1450 type bridge mcast_snooping 0", p.name),
		fmt.Sprintf("ip -n %s address add 10.0.0.1/16 dev br0", p.name),
		fmt.Sprintf("ip -n %s link set br0 up", p.name),
	); err != nil {
		return err
	}
	// Without this, the kernel would call iptables for bridged packets.
	return nsthread.InNamed(p.name, func() error {
		for _, name := range []string{"iptables", "ip6tables", "arptables"} {
			err := os.WriteFile("/proc/sys/net/bridge/bridge-nf-call-"+name, []byte("0"), 0)
			if err != nil && !os.IsNotExist(err) {
				return err
			}
		}
		return nil
	})
}

// attach makes a namespace and connects it to the bridge by ip(8) and bridge(8). It returns the namespace's name.
func (p *plainBridge) attach(ctx context.Context, number int) (string, error) {
	name := fmt.Sprintf("%s-e%d", p.name, number)
	return name, commands(ctx,
		"ip netns add "+name,
		fmt.Sprintf("ip -n %s link add p%d mtu 1450 type veth peer name eth0 address %s mtu 1450 netns %s",
			p.name, number, macOf(number), name),
		fmt.Sprintf("ip -n %s link set p%d master br0 up", p.name, number),
		fmt.Sprintf("bridge -n %s fdb replace %s dev p%d master static", p.name, macOf(number), number),
		fmt.Sprintf("ip -n %s link set lo up", name),
		fmt.Sprintf("ip -n %s address add %s/16 dev eth0", name, addressOf(number)),
		fmt.Sprintf("ip -n %s link set eth0 up", name),
		fmt.Sprintf("ip -n %s route add default via 10.0.0.1", name),
	)
}

// plainVXLAN is a pair of hosts, joined by a veth pair, whose bridges are joined by VXLAN without packet filter.
type plainVXLAN struct {
	hosts [2]*plainBridge
}

// newPlainVXLAN makes the hosts, with forwarding entries for the ports near, on the first host, and far, on the second
// one. The caller makes these ports with attach.
func newPlainVXLAN(ctx context.Context, name string, near, far int) (*plainVXLAN, error) {
	v := &plainVXLAN{}
	for i := range v.hosts {
		v.hosts[i] = &plainBridge{fmt.Sprintf("%s%s%d", prefix, name, i+1)}
	}
	if err := joinHosts(ctx, v.hosts[0].name, v.hosts[1].name); err != nil {
		return nil, err
	}
	for i, h := range v.hosts {
		if err := h.addBridge(ctx); err != nil {
			return nil, err
		}
		remote, vtep := far, "192.0.2.2"
		if i == 1 {
			remote, vtep = near, "192.0.2.1"
		}
		if err := commands(ctx,
			fmt.Sprintf("ip -n %s link add vx0 mtu 1450 type vxlan id 7 dstport 4789 local 192.0.2.%d dev eth0 nolearning",
				h.name, i+1),
			fmt.Sprintf("ip -n %s link set vx0 master br0 up", h.name),
			fmt.Sprintf("bridge -n %s fdb append %s dev vx0 dst %s self permanent", h.name, macOf(remote), vtep),
			fmt.Sprintf("bridge -n %s fdb replace %s dev vx0 master static", h.name, macOf(remote)),
			fmt.Sprintf("bridge -n %s fdb append 00:00:00:00:00:00 dev vx0 dst %s self permanent", h.name, vtep),
		); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// awaitNoPorts waits until no veth device is left in the namespaces. The kernel deletes them some time after the
// namespace at the other end.
func awaitNoPorts(ctx context.Context, namespaces ...string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return lab.Until(ctx, "the ports are deleted", func(context.Context) error {
		for _, name := range namespaces {
			ns, err := netns.GetFromName(name)
			if err != nil {
				return err
			}
			handle, err := netlink.NewHandleAt(ns)
			ns.Close()
			if err != nil {
				return err
			}
			links, err := handle.LinkList()
			handle.Close()
			if err != nil {
				return err
			}
			for _, l := range links {
				if l.Type() == "veth" && !strings.HasPrefix(l.Attrs().Name, "eth") {
					return fmt.Errorf("%s is in %s", l.Attrs().Name, name)
				}
			}
		}
		return nil
	})
}

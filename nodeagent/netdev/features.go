package netdev

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/netspace"
	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// MissingFeatures returns what the host's kernel lacks for VPCs, each with the option of the kernel's configuration or
// the module that provides it, in words for an operator. It makes one device of each kind in a network namespace of its
// own, which disappears with the call. An error means that the check itself failed.
func MissingFeatures(ctx context.Context) ([]string, error) {
	var missing []string
	err := nsthread.Do(func() error {
		ns, err := netns.New()
		if err != nil {
			missing = []string{fmt.Sprintf("network namespaces (CONFIG_NET_NS): %v", err)}
			return nil
		}
		defer ns.Close()
		k, err := newKernel(ctx, ns)
		if err != nil {
			return err
		}
		defer k.close()
		k.root = k.vpc
		for _, f := range features {
			if err := f.try(k); err != nil {
				missing = append(missing, fmt.Sprintf("%s (%s): %v", f.name, f.option, err))
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("check kernel features: %w", err)
	}
	return missing, nil
}

// features are tried in their order; later ones use the devices of earlier ones.
var features = []struct {
	name, option string
	try          func(*kernel) error
}{
	{"bridges", "CONFIG_BRIDGE", addBridge{"br0", cloud.GatewayMAC, minMTU}.apply},
	{"VXLAN", "CONFIG_VXLAN", addVXLAN{
		name: "vx0", mtu: minMTU, vxlan: vxlan{vni: 1, vtep: netip.IPv6Unspecified(), port: defaultUDPPort},
	}.apply},
	{"ARP suppression and flooding flags of bridge ports", "Linux 4.15", tryFlags},
	{"static entries of bridges and VXLAN devices", "Linux 5.0", replaceFDB{
		device: "vx0", mac: cloud.MAC{2}, bridge: true, vtep: netip.MustParseAddr("::1"),
	}.apply},
	{"IPv4 and IPv6 routing", "CONFIG_IPV6", hasSettings(namespaceSettings[:2])},
	{"packet filtering on bridges", "CONFIG_BRIDGE_NETFILTER, module br_netfilter", hasSettings([]sysctl{
		{path: "net/bridge/bridge-nf-call-arptables"},
	})},
	{"veth pairs", "CONFIG_VETH", func(k *kernel) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "veth0"
		veth := netlink.NewVeth(attrs)
		veth.PeerName = "veth1"
		return k.vpc.LinkAdd(veth)
	}},
	{"policy routing", "CONFIG_IP_MULTIPLE_TABLES, CONFIG_IPV6_MULTIPLE_TABLES", func(k *kernel) error {
		v4, v6 := tableRule{"br0", false, tableBase, rulePriority, 0}, tableRule{"br0", true, tableBase, rulePriority, 0}
		return errors.Join(addRule{v4}.apply(k), addRule{v6}.apply(k))
	}},
	{"IFB devices", "CONFIG_IFB", addLimiter{"ifb-00000000"}.apply},
	{"token buckets", "CONFIG_NET_SCH_TBF", replaceBucket{"ifb-00000000", newBucket(1)}.apply},
	{"redirection of received packets", "CONFIG_NET_SCH_INGRESS, CONFIG_NET_CLS_U32, CONFIG_NET_ACT_MIRRED",
		addRedirect{"veth0", "ifb-00000000"}.apply},
	{"taps", "CONFIG_TUN", func(*kernel) error {
		tap, err := openTap("tap0")
		if err == nil {
			err = tap.Close()
		}
		return err
	}},
	{"deletion of groups of devices", "Linux 2.6.39", func(k *kernel) error {
		return k.deleteLinks([]string{"br0", "vx0", "veth0", "ifb-00000000"})
	}},
}

// tryFlags sets the flags of a VXLAN device at a bridge and compares what the kernel then has. A kernel ignores flags
// that it does not know.
func tryFlags(k *kernel) error {
	for _, c := range []Change{setMaster{"vx0", "br0"}, setFlags{"vx0", overlayFlags}} {
		if err := c.apply(k); err != nil {
			return err
		}
	}
	all, err := netspace.List("bridge ports", k.readFlags)
	if err != nil {
		return err
	}
	if have := all[k.indexes["vx0"]]; have != overlayFlags {
		return fmt.Errorf("the kernel sets %q instead of %q", setFlags{"vx0", have}, setFlags{"vx0", overlayFlags})
	}
	return nil
}

func hasSettings(settings []sysctl) func(*kernel) error {
	return func(*kernel) error {
		for _, s := range settings {
			if _, known, err := readSysctl(s.path); err != nil || !known {
				return &os.PathError{Op: "read sysctl", Path: s.path, Err: unix.ENOENT}
			}
		}
		return nil
	}
}

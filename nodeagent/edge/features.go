package edge

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/netspace"
	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// MissingFeatures returns what this host lacks for the package, each in words for an operator. It is empty if the
// package works. The function makes a device of each kind and all rules in a network namespace of its own, which
// disappears with the call.
func MissingFeatures(ctx context.Context) []string {
	if _, err := exec.LookPath("nft"); err != nil {
		return []string{"the program nft is not installed"}
	}
	var missing []string
	err := nsthread.Do(func() error {
		ns, err := netns.New()
		if err != nil {
			return fmt.Errorf("network namespaces (CONFIG_NET_NS): %w", err)
		}
		handle, err := netlink.NewHandleAt(ns)
		if err != nil {
			ns.Close()
			return fmt.Errorf("netlink sockets: %w", err)
		}
		s := &space{
			Space: &netspace.Space{Handle: handle, NS: ns, Path: "a new namespace"}, ctx: ctx, changes: &[]string{},
		}
		defer s.Close()
		for _, f := range features {
			if err := f.try(s); err != nil {
				missing = append(missing, fmt.Sprintf("%s (%s): %v", f.name, f.option, err))
			}
		}
		return nil
	})
	if err != nil {
		missing = append(missing, err.Error())
	}
	return missing
}

// features are tried in their order; later ones use the devices of earlier ones.
var features = []struct {
	name, option string
	try          func(*space) error
}{
	{"veth pairs", "CONFIG_VETH", func(s *space) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "veth0"
		veth := netlink.NewVeth(attrs)
		veth.PeerName = "veth1"
		return s.LinkAdd(veth)
	}},
	{"macvlan devices", "CONFIG_MACVLAN", func(s *space) error {
		parent, err := s.LinkByName("veth0")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex = "macvlan0", parent.Attrs().Index
		return s.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE})
	}},
	{"policy routing", "CONFIG_IP_MULTIPLE_TABLES", func(s *space) error {
		n := &network{space: s, items: items{}}
		n.rule(routingRule{priority: vpcPriority, table: vpcTable})
		_, err := s.reconcile(nil, n.items)
		return err
	}},
	{"translation of addresses", "CONFIG_NFT_CT, CONFIG_NFT_NAT", func(s *space) error {
		all, c, err := exampleVPC()
		if err == nil {
			err = s.setTable(edgeChains(all, []*connection{c}))
		}
		if err == nil {
			err = s.setTable(vpcChains(all, []*connection{c}))
		}
		return err
	}},
	{"settings", "CONFIG_NF_CONNTRACK", func(s *space) error { return s.setSettings(edgeSettings) }},
}

// exampleVPC returns a connected VPC whose rules use every feature of nftables that the package needs.
func exampleVPC() ([]external, *connection, error) {
	all, err := checkExternals(map[string]External{
		"example": {Interface: "example", Address: netip.MustParsePrefix("203.0.113.2/24")},
	})
	c := &connection{number: 256, VPC: VPC{NAT: &cloud.HostNAT{External: "example"}, Floating: []cloud.HostFloating{{
		Address: netip.MustParseAddr("203.0.113.3"), External: "example", Fixed: netip.MustParseAddr("10.0.0.3"),
	}}}}
	c.near, c.far = addressesOf(c.number)
	return all, c, err
}

package firewall

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"

	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// MissingFeatures describes what this host lacks for the package. It is empty if the package works. The function tries
// out all features in a network namespace of its own, which it removes.
func MissingFeatures(ctx context.Context) []string {
	var missing []string
	for _, program := range []string{"nft", "iptables-nft", "iptables-nft-save", "iptables-nft-restore",
		"ip6tables-nft", "ip6tables-nft-save", "ip6tables-nft-restore"} {
		if _, err := exec.LookPath(program); err != nil {
			missing = append(missing, fmt.Sprintf("the program %s is not installed", program))
		}
	}
	for _, s := range sysctls(false) {
		if _, err := os.Stat("/proc/sys/" + s.name); err != nil {
			missing = append(missing, fmt.Sprintf("the kernel has no setting %s: %s", s.name, s.why))
		}
	}
	if len(missing) == 0 {
		if err := try(ctx); err != nil {
			missing = append(missing, err.Error())
		}
	}
	return missing
}

// try applies a VPC that uses every feature in a new network namespace.
func try(ctx context.Context) error {
	f, err := New(Options{
		Trusted: []string{"vx*"},
		Denied:  []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")},
	})
	if err != nil {
		return err
	}
	var ns netns.NsHandle
	err = nsthread.Do(func() (err error) {
		ns, err = netns.New()
		return err
	})
	if err != nil {
		return fmt.Errorf("make a network namespace: %w", err)
	}
	defer ns.Close()
	if _, err := f.Set(ctx, ns, exampleVPC()); err != nil {
		return err
	}
	_, err = f.Counters(ctx, ns)
	return err
}

// exampleVPC returns a VPC whose rules use every feature of the kernel that the package needs.
func exampleVPC() cloud.HostVPC {
	group := cloud.SecurityGroupID("example")
	port := cloud.HostPort{
		Device: "example", MAC: cloud.MAC{2, 0, 0, 0, 0, 1},
		IP: netip.MustParseAddr("10.0.0.5"), IP6: netip.MustParseAddr("fd00::5"),
		Secured: true, Groups: []cloud.SecurityGroupID{group},
		Pairs: []cloud.AddressPair{
			{CIDR: netip.MustParsePrefix("10.1.0.0/16")}, {CIDR: netip.MustParsePrefix("fd00:1::/64")},
		},
	}
	var rules []cloud.Rule
	for _, ipv6 := range []bool{false, true} {
		icmp := uint8(cloud.ProtocolICMP)
		if ipv6 {
			icmp = cloud.ProtocolICMPv6
		}
		for _, direction := range []cloud.Direction{cloud.Ingress, cloud.Egress} {
			ports := cloud.PortRange{First: 1, Last: 2}
			rule := cloud.Rule{Direction: direction, IPv6: ipv6, Protocol: icmp, ICMP: &cloud.ICMP{Type: 1, Code: 1}}
			rules = append(rules, rule)
			for _, protocol := range []uint8{cloud.ProtocolTCP, cloud.ProtocolUDP, cloud.ProtocolSCTP} {
				rule = cloud.Rule{Direction: direction, IPv6: ipv6, Protocol: protocol, Ports: ports, Group: group}
				rules = append(rules, rule)
			}
		}
	}
	return cloud.HostVPC{
		ID: "example", CIDR: netip.MustParsePrefix("10.0.0.0/16"), CIDR6: netip.MustParsePrefix("fd00::/56"),
		Subnets: []cloud.HostSubnet{{
			CIDR: netip.MustParsePrefix("10.0.0.0/24"), Gateway: netip.MustParseAddr("10.0.0.1"),
			CIDR6: netip.MustParsePrefix("fd00::/64"), Ports: []cloud.HostPort{port},
		}},
		Groups:  []cloud.HostGroup{{ID: group, Rules: rules}},
		Members: []cloud.GroupMembers{{ID: group, Addresses: []netip.Addr{port.IP, port.IP6}}},
	}
}

package balancer

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// MissingFeatures returns what this host lacks for the package, in words for an operator. The result is empty if the
// host lacks nothing. MissingFeatures makes rules of all kinds in a temporary network namespace.
func MissingFeatures(ctx context.Context) []string {
	err := nsthread.Do(func() error {
		ns, err := netns.New()
		if err != nil {
			return fmt.Errorf("network namespaces (CONFIG_NET_NS): %w", err)
		}
		defer ns.Close()
		if _, err = table.Set(ctx, ns, chains(exampleVPC())); err == nil {
			_, err = bridgeTable.Set(ctx, ns, bridgeChains(exampleVPC()))
		}
		return err
	})
	if err == nil {
		return nil
	}
	options := "CONFIG_NFT_CT, CONFIG_NFT_NAT, CONFIG_NFT_NUMGEN, CONFIG_NFT_HASH, CONFIG_NFT_REJECT"
	return []string{fmt.Sprintf("load balancing (%s): %v", options, err)}
}

// exampleVPC returns a VPC whose rules use every feature of nftables that the package needs.
func exampleVPC() *cloud.HostVPC {
	prefix := netip.MustParsePrefix("10.0.0.0/24")
	backends := []cloud.HostBackend{
		{Address: netip.MustParseAddr("10.0.0.2"), Weight: 1, Healthy: true},
		{Address: netip.MustParseAddr("10.0.0.3"), Weight: 2, Healthy: true},
	}
	ports := []cloud.ServicePort{
		{Protocol: cloud.ProtocolTCP, Port: 80, Target: 8080}, {Protocol: cloud.ProtocolUDP, Port: 53, Target: 53},
	}
	return &cloud.HostVPC{
		CIDR: prefix,
		Subnets: []cloud.HostSubnet{{
			VNI: 1, CIDR: prefix, Gateway: netip.MustParseAddr("10.0.0.1"),
			Ports: []cloud.HostPort{{Device: "tap0", Hairpin: true}},
		}},
		Services: []cloud.HostService{
			{Address: netip.MustParseAddr("10.0.0.8"), Ports: ports, Affinity: cloud.AffinityNone, Backends: backends},
			{Address: netip.MustParseAddr("10.0.0.9"), Ports: ports, Affinity: cloud.AffinityClientIP, Backends: backends},
		},
		Gateways: []cloud.HostGateway{
			{ServiceIP: "a", VNI: 2, HostNAT: cloud.HostNAT{Address: netip.MustParseAddr("203.0.113.2")}},
			{ServiceIP: "b", VNI: 3, VTEP: netip.MustParseAddr("192.0.2.2")},
		},
	}
}

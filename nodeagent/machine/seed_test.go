package machine

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

// TestSeedNetworkConfig checks the network configuration in a seed: static addresses without DHCP, and DHCPv4 if the
// control plane sent no configuration.
func TestSeedNetworkConfig(t *testing.T) {
	want := &agentv1.AssignedVm{
		VmId: "v",
		Nics: []*agentv1.AssignedNic{{Id: "a", MacAddress: "02:00:5e:10:00:01"}, {Id: "b", MacAddress: "02:00:5e:10:00:02"}},
		Seed: &agentv1.AssignedSeed{Nics: []*agentv1.AssignedSeedNic{{
			NicId: "b", Mtu: 1450, Addresses: []string{"10.1.0.2/24", "fd12::2/64"}, Gateways: []string{"10.1.0.1", "fd12::1"},
			DnsServers: []string{"10.1.0.1"}, Domain: "p.internal",
		}}},
	}
	image, err := seed(want)
	require.NoError(t, err)
	for _, line := range []string{"dhcp4: true", "- 10.1.0.2/24", "- fd12::2/64", "gateway6: fd12::1", "- 10.1.0.1", "- p.internal"} {
		require.Contains(t, string(image), line)
	}
	require.NotContains(t, string(image), "gateway4", "the first interface has the default route")
	require.NotContains(t, string(image), "dhcp6: true")

	first, err := seedPort(want.Seed, want.Nics[0])
	require.NoError(t, err)
	require.Equal(t, []netip.Prefix{anyIPv4}, first.Addresses)
	want.Seed.Nics[0].Dhcp = true
	image, err = seed(want)
	require.NoError(t, err)
	require.Contains(t, string(image), "dhcp6: true")
	require.NotContains(t, string(image), "10.1.0.2")

	want.Seed.Nics[0].Gateways = []string{"nowhere"}
	_, err = seed(want)
	require.ErrorIs(t, err, qemu.ErrInvalid)
	require.ErrorContains(t, err, "network interface b")
}

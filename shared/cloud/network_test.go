package cloud

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/fault"
)

func TestParseCIDR(t *testing.T) {
	_, err := ParseCIDR("cidr_block", "")
	f, _ := fault.From(err)
	require.Equal(t, "cidr_block is required", f.Message)
	require.Equal(t, "cidr_block", f.Field)
	require.Equal(t, "required", f.Details["constraint"])
	for s, want := range map[string]string{
		"10.0.0.0":       `must be a prefix such as 10.0.0.0/16, got "10.0.0.0"`,
		"10.0.0.0/33":    `must be a prefix such as 10.0.0.0/16, got "10.0.0.0/33"`,
		"010.0.0.0/8":    "must be a prefix",
		"10.0.0.0/08":    "must be a prefix",
		" 10.0.0.0/8":    "must be a prefix",
		"::ffff:10.0/96": "must be a prefix",
		"10.0.0.1/8":     "has bits beyond the length of the prefix: use 10.0.0.0/8",
	} {
		_, err := ParseCIDR("cidr_block", s)
		require.ErrorContains(t, err, want, s)
		f, _ := fault.From(err)
		require.Equal(t, "cidr", f.Details["constraint"], s)
	}
	p, err := ParseCIDR("cidr_block", "fd00:1::/48")
	require.NoError(t, err)
	require.Equal(t, netip.MustParsePrefix("fd00:1::/48"), p)
}

func TestCheckPrefixes(t *testing.T) {
	vpc := &VPC{CIDR: netip.MustParsePrefix("10.1.0.0/16"), CIDR6: netip.MustParsePrefix("fd00:1::/48")}
	noIPv6 := &VPC{CIDR: vpc.CIDR}
	for _, c := range []struct {
		check  func(netip.Prefix) error
		prefix string
		want   string // constraint, empty if valid
	}{
		{func(p netip.Prefix) error { return CheckVPCPrefix("f", p) }, "10.0.0.0/8", ""},
		{func(p netip.Prefix) error { return CheckVPCPrefix("f", p) }, "192.168.7.16/28", ""},
		{func(p netip.Prefix) error { return CheckVPCPrefix("f", p) }, "172.31.0.0/16", ""},
		{func(p netip.Prefix) error { return CheckVPCPrefix("f", p) }, "172.16.0.0/11", "private"},
		{func(p netip.Prefix) error { return CheckVPCPrefix("f", p) }, "172.32.0.0/16", "private"},
		{func(p netip.Prefix) error { return CheckVPCPrefix("f", p) }, "224.0.0.0/8", "private"},
		{func(p netip.Prefix) error { return CheckVPCPrefix("f", p) }, "8.8.8.0/24", "private"},
		{func(p netip.Prefix) error { return CheckVPCPrefix("f", p) }, "0.0.0.0/0", "prefix_length"},
		{func(p netip.Prefix) error { return CheckVPCPrefix("f", p) }, "10.0.0.0/29", "prefix_length"},
		{func(p netip.Prefix) error { return CheckVPCPrefix("f", p) }, "fd00::/48", "ipv4"},
		{func(p netip.Prefix) error { return CheckVPCPrefix6("f", p) }, "fd00:1::/48", ""},
		{func(p netip.Prefix) error { return CheckVPCPrefix6("f", p) }, "fd00:1::/56", ""},
		{func(p netip.Prefix) error { return CheckVPCPrefix6("f", p) }, "fd00:1::/57", "prefix_length"},
		{func(p netip.Prefix) error { return CheckVPCPrefix6("f", p) }, "2001:db8::/48", "private"},
		{func(p netip.Prefix) error { return CheckVPCPrefix6("f", p) }, "fe80::/48", "private"},
		{func(p netip.Prefix) error { return CheckVPCPrefix6("f", p) }, "10.0.0.0/16", "ipv6"},
		{func(p netip.Prefix) error { return CheckSubnetPrefix("f", vpc, p) }, "10.1.0.0/16", ""},
		{func(p netip.Prefix) error { return CheckSubnetPrefix("f", vpc, p) }, "10.1.255.248/29", ""},
		{func(p netip.Prefix) error { return CheckSubnetPrefix("f", vpc, p) }, "10.1.0.0/30", "prefix_length"},
		{func(p netip.Prefix) error { return CheckSubnetPrefix("f", vpc, p) }, "10.0.0.0/8", "within_vpc"},
		{func(p netip.Prefix) error { return CheckSubnetPrefix("f", vpc, p) }, "10.2.0.0/24", "within_vpc"},
		{func(p netip.Prefix) error { return CheckSubnetPrefix("f", vpc, p) }, "fd00:1::/64", "within_vpc"},
		{func(p netip.Prefix) error { return CheckSubnetPrefix6("f", vpc, p) }, "fd00:1:0:7::/64", ""},
		{func(p netip.Prefix) error { return CheckSubnetPrefix6("f", vpc, p) }, "fd00:1::/63", "within_vpc"},
		{func(p netip.Prefix) error { return CheckSubnetPrefix6("f", vpc, p) }, "fd00:2::/64", "within_vpc"},
		{func(p netip.Prefix) error { return CheckSubnetPrefix6("f", noIPv6, p) }, "fd00:1::/64", "within_vpc"},
	} {
		err := c.check(netip.MustParsePrefix(c.prefix))
		if c.want == "" {
			require.NoError(t, err, c.prefix)
			continue
		}
		f, ok := fault.From(err)
		require.True(t, ok, c.prefix)
		require.Equal(t, c.want, f.Details["constraint"], c.prefix)
		require.Equal(t, "f", f.Field)
	}
}

func TestCheckGateway(t *testing.T) {
	p := netip.MustParsePrefix("10.1.2.0/26")
	require.NoError(t, CheckGateway("gateway_ip", p, netip.MustParseAddr("10.1.2.1")))
	require.NoError(t, CheckGateway("gateway_ip", p, netip.MustParseAddr("10.1.2.62")))
	for a, want := range map[string]string{"10.1.2.0": "network address", "10.1.2.63": "broadcast address", "10.1.2.64": "within the subnet", "fd00::1": "within the subnet"} {
		require.ErrorContains(t, CheckGateway("gateway_ip", p, netip.MustParseAddr(a)), want)
	}
}

func TestLast(t *testing.T) {
	for p, want := range map[string]string{
		"10.0.0.0/8": "10.255.255.255", "10.1.2.0/26": "10.1.2.63", "10.1.2.3/32": "10.1.2.3", "0.0.0.0/0": "255.255.255.255",
		"fd00:1::/48": "fd00:1:0:ffff:ffff:ffff:ffff:ffff",
	} {
		require.Equal(t, want, Last(netip.MustParsePrefix(p)).String(), p)
	}
}

package vpc

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/edge"
	"github.com/trivet-cloud/trivet/nodeagent/nettest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestErrorsOfOtherVPCs requires that a VPC that cannot be connected to an external network, and an external network
// that is missing, do not prevent the application of VPCs that do not need them. It also requires that a VPC is not
// removed before its addresses are no longer answered.
func TestErrorsOfOtherVPCs(t *testing.T) {
	n := nettest.NewNamespaces(t, "oe")
	for _, name := range []string{"host", "a", "b", "c"} {
		n.Add(name)
	}
	plug := func() {
		n.IP("host", "link add eth1 type bridge")
		n.IP("host", "link set eth1 up")
	}
	plug()
	e, err := edge.New(edge.Options{
		Prefix: n.Prefix + "host-", Namespace: n.Path("host"), External: map[string]edge.External{"internet": {
			Interface: "eth1", Address: netip.MustParsePrefix("203.0.113.2/24"),
		}},
	})
	require.NoError(t, err)
	t.Cleanup(e.Close)
	o := newExternalNetworks(e)
	state := func(id cloud.VPCID, addresses ...string) edge.VPC {
		v := edge.VPC{ID: id, Namespace: n.Path(string(id)), CIDR: netip.MustParsePrefix("10.0.0.0/16")}
		for i, a := range addresses {
			v.Floating = append(v.Floating, cloud.HostFloating{
				Address: netip.MustParseAddr(a), External: "internet", Fixed: netip.AddrFrom4([4]byte{10, 0, 1, byte(10 + i)}),
			})
		}
		return v
	}
	set := func(v edge.VPC) error {
		_, err := o.set(t.Context(), v)
		return err
	}
	answered := func() string { return n.IP("host-edge", "neighbour show proxy") }

	require.NoError(t, set(state("a", "203.0.113.10")))
	require.ErrorContains(t, set(state("b", "203.0.113.10")), "203.0.113.10 belongs to a already")
	require.NoError(t, set(state("a", "203.0.113.10", "203.0.113.11")))
	require.NoError(t, set(state("c")))
	require.ErrorContains(t, set(state("b", "203.0.113.10")), "203.0.113.10 belongs to a already")
	require.NoError(t, o.remove(t.Context(), "a"))
	require.NotContains(t, answered(), "203.0.113.11")
	require.NoError(t, set(state("b", "203.0.113.10")))
	require.Contains(t, answered(), "203.0.113.10")

	n.IP("host", "link delete eth1")
	require.NoError(t, set(state("c")))
	require.Error(t, set(state("b", "203.0.113.10", "203.0.113.11")))
	for range 2 {
		require.Error(t, o.remove(t.Context(), "b"))
	}
	plug()
	require.NoError(t, o.remove(t.Context(), "b"))
	require.NotContains(t, answered(), "203.0.113")
}

package edge

import (
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestRules compares the rules of two VPCs with the same addresses, as input for nft, with testdata/rules. Run it with
// -rewrite to accept changes.
func TestRules(t *testing.T) {
	all, err := checkExternals(map[string]External{
		"internet": {Interface: "eth1", Address: parsePrefix("203.0.113.2/24"), Gateway: parseAddr("203.0.113.1")},
		"office":   {Interface: "eth2", Address: parsePrefix("192.0.2.2/24")},
	})
	require.NoError(t, err)
	a := &connection{number: 300, VPC: VPC{ID: "a", NAT: &cloud.HostNAT{External: "office"},
		Floating: []cloud.HostFloating{floating("203.0.113.111", "10.0.1.11"), floating("203.0.113.110", "10.0.1.10")}}}
	own := &cloud.HostNAT{External: "office", Address: parseAddr("192.0.2.9")}
	b := &connection{number: 400, VPC: VPC{ID: "b", NAT: own,
		Floating: []cloud.HostFloating{floating("203.0.113.120", "10.0.1.10")}}}
	for _, c := range []*connection{a, b} {
		c.near, c.far = addressesOf(c.number)
	}
	datadriven.RunTest(t, "testdata/rules", func(t *testing.T, d *datadriven.TestData) string {
		switch d.Cmd {
		case "edge":
			return table.Script(edgeChains(all, []*connection{a, b}))
		case "edge-without-vpcs":
			return table.Script(edgeChains(all, nil))
		case "vpc-a":
			return table.Script(vpcChains(all, []*connection{a}))
		case "vpc-b":
			return table.Script(vpcChains(all, []*connection{b}))
		}
		t.Fatalf("unknown command %s", d.Cmd)
		return ""
	})
}

package edge

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestManyVPCs connects 40 VPCs with the same addresses, and requires that each has addresses of its own and that
// adding one writes nothing in the namespaces of the others.
func TestManyVPCs(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	var s State
	for i := range 40 {
		name := fmt.Sprintf("v%d", i)
		l.Add(name)
		s.VPCs = append(s.VPCs, VPC{
			ID: cloud.VPCID(name), Namespace: l.Path(name), CIDR: parsePrefix("10.0.0.0/16"),
			NAT:      &cloud.HostNAT{External: internet},
			Floating: []cloud.HostFloating{floating(fmt.Sprintf("203.0.113.%d", 100+i), "10.0.1.10")},
		})
	}
	set := func(n int) Result {
		began := time.Now()
		r, err := h.edge.Set(t.Context(), State{VPCs: s.VPCs[:n]})
		require.NoError(t, err)
		t.Logf("%d VPCs, %d writes: %s", n, len(r.Changes), time.Since(began).Round(time.Millisecond))
		return r
	}
	set(39)
	require.Empty(t, set(39))
	r := set(40)
	for _, change := range r.Changes {
		require.Regexp(t, fmt.Sprintf(`^\[%s(v39|h1-edge)\] `, l.Prefix), change)
	}
	require.Empty(t, set(40))
}

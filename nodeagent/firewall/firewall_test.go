package firewall

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

func TestMissingFeatures(t *testing.T) {
	require.Empty(t, MissingFeatures(t.Context()))
}

// TestUnchangedWritesNothing applies a state twice, the second time with a new Firewall as after a restart.
func TestUnchangedWritesNothing(t *testing.T) {
	l := newLab(t)
	l.add(t, 0, 5, "a", "b")
	l.add(t, 0, 6, "a")
	l.add(t, 1, 7)
	l.group("a", allowAll(cloud.Ingress, cloud.Egress)...)
	l.group("b", exampleVPC().Groups[0].Rules...)
	first := l.set(t)
	require.NotZero(t, first.Writes)
	before := l.dump(t)
	require.Equal(t, Result{}, l.set(t))
	l.restart(t)
	require.Equal(t, Result{}, l.set(t), "a new Firewall")
	require.Equal(t, before, l.dump(t))
}

// TestLooseTCP checks that conntrack accepts TCP connections from the middle exactly while the VPC has LooseTCP.
func TestLooseTCP(t *testing.T) {
	l := newLab(t)
	for _, loose := range []bool{false, true, false} {
		l.vpc.LooseTCP = loose
		require.NotZero(t, l.set(t).Writes)
		want := map[bool]string{false: "0\n", true: "1\n"}[loose]
		require.Equal(t, want, runIn(t, l.ns, "", "cat", "/proc/sys/net/netfilter/nf_conntrack_tcp_loose"))
		require.Equal(t, Result{}, l.set(t))
		text, err := Text(l.vpc, testOptions)
		require.NoError(t, err)
		require.Contains(t, text, "net.netfilter.nf_conntrack_tcp_loose = "+want)
	}
}

func TestSumColumn(t *testing.T) {
	stat := "entries  drop early_drop\n00000007  0000000a 00000001\n00000007  00000001 00000002\n"
	require.EqualValues(t, 11, sumColumn(stat, "drop"), "one line for each CPU")
	require.EqualValues(t, 3, sumColumn(stat, "early_drop"))
	require.Zero(t, sumColumn(stat, "missing"), "a kernel without the column")
	require.Zero(t, sumColumn("", "drop"))
}

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

func TestSumColumn(t *testing.T) {
	stat := "entries  drop early_drop\n00000007  0000000a 00000001\n00000007  00000001 00000002\n"
	require.EqualValues(t, 11, sumColumn(stat, "drop"), "one line for each CPU")
	require.EqualValues(t, 3, sumColumn(stat, "early_drop"))
	require.Zero(t, sumColumn(stat, "missing"), "a kernel without the column")
	require.Zero(t, sumColumn("", "drop"))
}

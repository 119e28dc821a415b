package netdev

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestMigrationWindow requires that conntrack accepts TCP connections from the middle for the given time after a
// migration, in the VPC of the migrated port only.
func TestMigrationWindow(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	vpc := testVPC(l, "a", 100, place{1, 10, 0})[0]
	other := testVPC(l, "b", 200, place{1, 10, 0})[0]
	now := time.Now()
	m := NewMigrations(30*time.Second, func() time.Time { return now })
	apply := func(vpc *cloud.HostVPC) (changes []string, again time.Duration) {
		again = m.Set(vpc)
		return texts(h.apply(*vpc)), again
	}
	loose := func(id cloud.VPCID) (value string) {
		require.NoError(t, l.in(h.vpcName(id), func() (err error) {
			value, _, err = readSysctl("net/netfilter/nf_conntrack_tcp_loose")
			return err
		}))
		return value
	}
	apply(&vpc)
	apply(&other)
	require.Equal(t, "0", loose("a"), "no port was migrated")

	m.Bound("a")
	changes, again := apply(&vpc)
	require.Equal(t, []string{"sysctl -w net/netfilter/nf_conntrack_tcp_loose=1"}, changes)
	require.Equal(t, 30*time.Second, again)
	changes, _ = apply(&other)
	require.Empty(t, changes)
	require.Equal(t, "0", loose("b"))

	now = now.Add(20 * time.Second)
	m.Bound("a") // another VM
	now = now.Add(20 * time.Second)
	changes, again = apply(&vpc)
	require.Empty(t, changes)
	require.Equal(t, 10*time.Second, again)

	now = now.Add(again)
	_, again = apply(&vpc)
	require.Equal(t, "0", loose("a"), "the window has ended")
	require.Zero(t, again)

	m = NewMigrations(0, func() time.Time { return now })
	m.Bound("a")
	_, again = apply(&vpc)
	require.Equal(t, "0", loose("a"), "the window has no length")
	require.Zero(t, again)
}

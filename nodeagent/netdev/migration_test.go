package netdev

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestMigrationWindow requires that a VPC has LooseTCP for the given time after each migration of one of its ports, and
// that other VPCs do not have it.
func TestMigrationWindow(t *testing.T) {
	now := time.Now()
	m := NewMigrations(30*time.Second, func() time.Time { return now })
	requireWindow := func(id cloud.VPCID, left time.Duration, why string) {
		t.Helper()
		vpc := cloud.HostVPC{ID: id, LooseTCP: left == 0} // Set changes the field in both directions
		require.Equal(t, left, m.Set(&vpc), why)
		require.Equal(t, left > 0, vpc.LooseTCP, why)
	}
	requireWindow("a", 0, "no port was migrated")

	m.Bound("a")
	requireWindow("a", 30*time.Second, "a port was migrated")
	requireWindow("b", 0, "a port of another VPC was migrated")

	now = now.Add(20 * time.Second)
	m.Bound("a") // another VM
	now = now.Add(20 * time.Second)
	requireWindow("a", 10*time.Second, "the second migration extends the window")

	now = now.Add(10 * time.Second)
	requireWindow("a", 0, "the window has ended")

	m = NewMigrations(0, func() time.Time { return now })
	m.Bound("a")
	requireWindow("a", 0, "the window has no length")
}

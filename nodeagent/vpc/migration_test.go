package vpc

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestMovingPort checks on both hosts of a migration that a VPC counts as one with a moving port until the migration
// has ended. Until looseWindow after that, the host must accept packets of TCP connections that began at the other
// host.
func TestMovingPort(t *testing.T) {
	moving := func(port string) bool {
		var tab tables
		u := parseUpdate(t, "vpc a\nsubnet s1 vpc=a net=1\n"+port)
		u.Snapshot = true
		tab.apply(&u)
		w, ok := tab.hostVPC(cloud.VPCID("a"), selfVTEP)
		require.True(t, ok)
		return w.Moving
	}
	require.True(t, moving("port p5 vpc=a subnet=s1 at=10.0.1.5 node=n2 moves=n1"))
	require.True(t, moving("port p5 vpc=a subnet=s1 at=10.0.1.5 node=n1 moves=n2"))
	require.False(t, moving("port p5 vpc=a subnet=s1 at=10.0.1.5 node=n1"))
	require.False(t, moving("port p5 vpc=a subnet=s1 at=10.0.1.5 node=n2"))
	require.False(t, moving("port p5 vpc=a subnet=s1 at=10.0.1.5 node=n2 moves=n3"))
}

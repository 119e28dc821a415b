package main

import (
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLeaseGuard checks when VMs that need a lease may run: with a lease, and after a lease has ended only with the
// assignment of a session that has renewed the lease.
func TestLeaseGuard(t *testing.T) {
	valid := true
	var ended bool
	g := &leaseGuard{valid: func() bool { return valid }, set: func(e bool) { ended = e }, log: slog.New(slog.DiscardHandler)}
	check := func(want bool, why string) {
		t.Helper()
		require.Equal(t, want, g.check(), why)
		require.Equal(t, want, ended, why)
	}
	check(false, "a restarted agent whose predecessor has left a lease")
	g.connected()
	g.assigned()
	valid = false
	check(true, "VMs run without a lease")
	valid = true
	g.connected()
	check(true, "VMs start from an assignment of an earlier session")
	g.assigned()
	check(false, "a heartbeat was acknowledged, and the assignment has arrived")
	g.connected()
	check(false, "the lease has not ended between two sessions")
	valid = false
	check(true, "VMs run without a lease")
	g.assigned()
	check(true, "the lease has ended")
	g.connected()
	valid = true
	check(true, "VMs start from an assignment of an earlier session")
	g.assigned()
	check(false, "a heartbeat was acknowledged, and the assignment has arrived")
}

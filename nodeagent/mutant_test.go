//go:build mutant

package main

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables each mutant (a deliberate bug) of the lease, and checks that a test notices it.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.RunWithoutLease, TestLeaseGuard, "VMs run without a lease")
	mutanttest.Notices(t, mutant.StartStaleAssignment, TestLeaseGuard, "VMs start from an assignment of an earlier session")
}

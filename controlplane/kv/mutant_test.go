//go:build mutant

package kv

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that the tests fail if a rule of leases, compaction, permissions or the CORRUPT alarm is broken on
// purpose.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.ExpireEarly, TestNewLeaderRestartsTTLs, `is not greater than`)
	mutanttest.Notices(t, mutant.ExpireDeposed, TestDeposedLeaderRevokesNoLeases, `the old leader ended the lease`)
	mutanttest.Notices(t, mutant.ReadCompacted, TestCompaction, `Not equal`)
	mutanttest.Notices(t, mutant.SkipPermissions, TestAuthAdministration, `Not equal`)
	mutanttest.Notices(t, mutant.StalePermission, TestPermissionRevokedDuringWrite, `Not equal`)
	mutanttest.Notices(t, mutant.HideCorruption, TestCompareKeyspaceRaisesCorrupt, `Not equal`)
}

//go:build mutant

package kv

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants breaks rules of leases, compaction, etcd's users and the corruption alarm.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.ExpireEarly, TestNewLeaderRestartsTTLs, `is not greater than`)
	mutanttest.Notices(t, mutant.ExpireDeposed, TestDeposedLeaderRevokesNoLeases, `the old leader ended the lease`)
	mutanttest.Notices(t, mutant.ReadCompacted, TestCompaction, `Not equal`)
	mutanttest.Notices(t, mutant.SkipPermissions, TestAuthAdministration, `Not equal`)
	mutanttest.Notices(t, mutant.StalePermission, TestPermissionRevokedDuringWrite, `Not equal`)
	mutanttest.Notices(t, mutant.HideCorruption, TestCompareKeyspaceRaisesCorrupt, `Not equal`)
}

//go:build mutant

package kv

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants breaks rules of leases, compaction, etcd's users and the corruption alarm.
func TestMutants(t *testing.T) {
	mutanttest.Noticed(t, mutant.ExpireEarly, newLeaderKeepsTTL)
	mutanttest.Noticed(t, mutant.ExpireDeposed, deposedLeaderEndsNothing)
	mutanttest.Noticed(t, mutant.ReadCompacted, compactionRules)
	mutanttest.Noticed(t, mutant.SkipPermissions, authAdministration)
	mutanttest.Noticed(t, mutant.IgnoreEpoch, revokedPermission)
	mutanttest.Noticed(t, mutant.HideCorruption, otherDataRaisesAlarm)
}

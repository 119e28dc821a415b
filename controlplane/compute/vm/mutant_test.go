//go:build mutant

package vm

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// The tests of this package fail if a rule of creating VMs is broken.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.ForgetAnswers, TestCreateOnceUnderAKey, "the project has a VM called web")
	mutanttest.Notices(t, mutant.StaleQuota, TestQuotaAtOnce, "more VMs than the quota allows")
	mutanttest.Notices(t, mutant.StaleQuota, TestANewProjectDoesNotEscapeTheQuotaOfItsOrg, "more VMs than the quota allows")
	mutanttest.Notices(t, mutant.AllocateTwice, TestCapacityIsNotGivenTwice, "more VMs than the host has room for")
}

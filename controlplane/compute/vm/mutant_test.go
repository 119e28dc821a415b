//go:build mutant

package vm

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that the tests of this package fail when a rule for creating VMs is switched off by a mutant.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.ForgetAnswers, TestCreateIsIdempotent, "the project has a VM called web")
	mutanttest.Notices(t, mutant.StaleQuota, TestConcurrentQuota, "more VMs than the quota allows")
	mutanttest.Notices(t, mutant.StaleQuota, TestOrgQuotaCoversNewProjects, "more VMs than the quota allows")
	mutanttest.Notices(t, mutant.AllocateTwice, TestConcurrentCreatesShareNoCapacity, "more VMs than the host has room for")
}

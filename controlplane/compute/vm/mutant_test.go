//go:build mutant

package vm

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// The tests of this package fail if a rule of creating VMs is broken.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.ForgetAnswers, TestCreateIsIdempotent, "the project has a VM called web")
	mutanttest.Notices(t, mutant.StaleQuota, TestConcurrentQuota, "more VMs than the quota allows")
	mutanttest.Notices(t, mutant.StaleQuota, TestOrgQuotaCoversNewProjects, "more VMs than the quota allows")
	mutanttest.Notices(t, mutant.AllocateTwice, TestConcurrentCreatesShareNoCapacity, "more VMs than the host has room for")
}

//go:build mutant

package tenant_test

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that the tests of the default quota notice when new projects do not get it.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.SkipDefaultQuota, TestNewProjectsGetTheDefaultQuota, "a new project did not get the default quota")
}

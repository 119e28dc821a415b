//go:build mutant

package storage

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables a mutant (a deliberate bug) of the rules for encrypted volumes, and checks that a test fails.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.OpenPlainVolume, TestPlainFileIsNotOpenedAsEncrypted)
}

//go:build mutant

package backup

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that TestDamagedArchiveIsRefused notices when Extract accepts an archive whose end is missing.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.AcceptTruncated, TestDamagedArchiveIsRefused, "the archive is cut short")
}

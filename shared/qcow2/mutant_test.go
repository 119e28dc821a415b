//go:build mutant

package qcow2

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that TestInspectRefuses fails if Inspect accepts an image with a backing file, an external data
// file, or encryption.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.AcceptBackingFile, TestInspectRefuses, `TestInspectRefuses/backing_file`)
	mutanttest.Notices(t, mutant.AcceptDataFile, TestInspectRefuses, `TestInspectRefuses/`)
	mutanttest.Notices(t, mutant.AcceptEncrypted, TestInspectRefuses, `TestInspectRefuses/encrypted`)
}

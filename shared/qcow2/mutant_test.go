//go:build mutant

package qcow2

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants accepts images that make QEMU read other files or need a key.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.AcceptBackingFile, TestInspectRefuses, `TestInspectRefuses/backing_file`)
	mutanttest.Notices(t, mutant.AcceptDataFile, TestInspectRefuses, `TestInspectRefuses/`)
	mutanttest.Notices(t, mutant.AcceptEncrypted, TestInspectRefuses, `TestInspectRefuses/encrypted`)
}

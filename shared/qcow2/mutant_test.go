//go:build mutant

package qcow2

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants accepts images that make QEMU read other files or need a key. The refusals that Inspect is tested for must show that.
func TestMutants(t *testing.T) {
	mutanttest.Noticed(t, mutant.AcceptBackingFile, inspectRefuses)
	mutanttest.Noticed(t, mutant.AcceptDataFile, inspectRefuses)
	mutanttest.Noticed(t, mutant.AcceptEncrypted, inspectRefuses)
}

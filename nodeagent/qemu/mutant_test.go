//go:build mutant

package qemu

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants starts QEMU less confined, in one way at a time.
func TestMutants(t *testing.T) {
	mutanttest.Noticed(t, mutant.GuestAsRoot, confinement)
	mutanttest.Noticed(t, mutant.GuestUnsandboxed, confinement)
	mutanttest.Noticed(t, mutant.GuestOutsideCgroup, confinement)
	mutanttest.Noticed(t, mutant.GuestKeepsCaps, confinement)
}

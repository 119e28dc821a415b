//go:build mutant

package ipsec

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants disables single rules of the package and checks that the test of each then fails.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.AcceptPlainVXLAN, TestPlainVXLANIsDropped, "a VXLAN packet that is not encrypted arrives")
}

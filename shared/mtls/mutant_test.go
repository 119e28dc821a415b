//go:build mutant

package mtls

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// The tests of this package fail if a port accepts certificates of every kind.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.AnyCertificate, TestWhichKindsConnect, "node at peers")
}

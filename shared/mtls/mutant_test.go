//go:build mutant

package mtls

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that TestWhichKindsConnect fails if a port accepts certificates of every kind (mutant
// AnyCertificate).
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.AnyCertificate, TestWhichKindsConnect, "node at peers")
}

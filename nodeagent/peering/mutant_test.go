//go:build mutant

package peering

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants disables single rules of the package and checks that the test of each then fails.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.AnyPeerSource, TestForgedSources, "a packet from the forged source 203.0.113.7 arrives")
	mutanttest.Notices(t, mutant.TransitPeering, TestNotTransitive, "a VPC reaches the external network of its peer")
	mutanttest.Notices(t, mutant.TrackTransit, TestTransitIsNotTracked, "does not reach 10.2.1.20 over tcp4")
}

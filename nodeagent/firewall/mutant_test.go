//go:build mutant

package firewall

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants disables single rules of the package and checks that the test of each then fails.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.AcceptBeforeRules, TestDefaultDeny, "no egress rule")
	mutanttest.Notices(t, mutant.PassForged, TestSpoofMatrix, `expected: "spoof"`)
	mutanttest.Notices(t, mutant.TrustAfterError, TestUpdateReadsBackAfterAnError, "was not read after an error")
	mutanttest.Notices(t, mutant.AnyList, TestManyLists, `expected: "group"`)
	mutanttest.Notices(t, mutant.OverlappingLists, TestRulesWithinPairs, `expected: "group"`)
	mutanttest.Notices(t, mutant.DropOldList, TestChangedListLosesNoFlow, "its first datagram or the answer was lost")
	mutanttest.Notices(t, mutant.PassReserved, TestSpoofMatrix, `expected: "spoof"`)
	mutanttest.Notices(t, mutant.ForwardDenied, TestDeniedPrefixes, "to a denied prefix")
	mutanttest.Notices(t, mutant.KeepRevoked, TestRevokeUDP, "datagrams arrive after the permission was revoked")
	mutanttest.Notices(t, mutant.LooseConntrack, TestRevokeTCP, "segments arrive after the permission was revoked")
}

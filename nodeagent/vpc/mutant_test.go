//go:build mutant

package vpc

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that the tests detect each mutant of this package.
func TestMutants(t *testing.T) {
	defer mutant.Set("")
	mutant.Set(mutant.AnnounceTwice)
	require.True(t, announcesTwice())
	require.True(t, gatewayOnTwoHosts())
	mutant.Set(mutant.ActivateEarly)
	require.True(t, activatesUnfiltered(t))
	mutant.Set(mutant.AcceptBeforeRules)
	early, _ := newManyPorts(t, 10).startAll()
	require.NotZero(t, early)
	mutant.Set(mutant.KeepRevoked)
	require.NotEmpty(t, newManyPorts(t, 2).revoke(10))
	mutanttest.Notices(t, mutant.ReachHosts, TestHostsAreDenied, "a guest reached a host")
	mutant.Set("")
	mutanttest.Notices(t, mutant.KeepCutOffAddress, TestCutOffHostWithdraws, answeredTwice)
	mutanttest.Notices(t, mutant.SkipToken, TestGuestIsRenderedOnce, "tokens are required")
}

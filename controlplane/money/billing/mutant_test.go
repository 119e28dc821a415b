//go:build mutant

package billing

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// TestMutants enables each mutant (a deliberate bug) of a billing rule, and checks that the simulation notices it
// within 12 seeds.
func TestMutants(t *testing.T) {
	t.Cleanup(func() { mutant.Set("") })
	for _, name := range []string{mutant.ChargeHourTwice, mutant.ForgetShortRuns, mutant.KeepPaidBill, mutant.KeepReservation, mutant.AdmitDebtor} {
		t.Run(name, func(t *testing.T) {
			mutant.Set(name)
			for seed := range uint64(12) {
				if err := simulate(t, seed, 250); err != nil {
					t.Log(err)
					return
				}
			}
			require.Fail(t, "the simulation did not notice the mutant within 12 seeds")
		})
	}
}

//go:build mutant

package ledger_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger/ledgertest"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// TestMutants enables each mutant (a deliberate bug) of a ledger rule, and checks that the comparison with the model
// notices it within 10 seeds.
func TestMutants(t *testing.T) {
	t.Cleanup(func() { mutant.Set("") })
	for _, name := range []string{mutant.IgnoreHolds, mutant.CommitTwice, mutant.LateCommit} {
		t.Run(name, func(t *testing.T) {
			mutant.Set(name)
			for seed := range uint64(10) {
				if err := ledgertest.Run(seed, 2000, ledgertest.NewMemory()); err != nil {
					t.Log(err)
					return
				}
			}
			require.Fail(t, "the model did not notice the mutant within 10 seeds")
		})
	}
}

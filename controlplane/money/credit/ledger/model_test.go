package ledger_test

import (
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger/ledgertest"
)

// soak is how many commands are played: TRIVET_LEDGER_COMMANDS, spread over TRIVET_LEDGER_SEEDS.
func soak(t *testing.T, name string, normal int) int {
	text := os.Getenv(name)
	if text == "" {
		return normal
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err, name)
	require.Positive(t, n, name)
	return n
}

// The ledger does what a naive model does, whatever is asked of it, and adds up after each command.
func TestLedgerIsTheModel(t *testing.T) {
	seeds := soak(t, "TRIVET_LEDGER_SEEDS", 500)
	commands := soak(t, "TRIVET_LEDGER_COMMANDS", 500_000) / seeds
	for seed := range uint64(seeds) {
		require.NoError(t, ledgertest.Run(seed, commands, ledgertest.NewMemory()))
	}
	t.Logf("%d commands over %d seeds", seeds*commands, seeds)
}

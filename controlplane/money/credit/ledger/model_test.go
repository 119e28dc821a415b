package ledger_test

import (
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger/ledgertest"
)

// soak returns the number of commands: TRIVET_LEDGER_COMMANDS, divided among TRIVET_LEDGER_SEEDS seeds.
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

// Random commands have the same results as in a naive model, and the ledger stays consistent.
func TestLedgerMatchesTheModel(t *testing.T) {
	seeds := soak(t, "TRIVET_LEDGER_SEEDS", 500)
	commands := soak(t, "TRIVET_LEDGER_COMMANDS", 500_000) / seeds
	for seed := range uint64(seeds) {
		require.NoError(t, ledgertest.Run(seed, commands, ledgertest.NewMemory()))
	}
	t.Logf("%d commands over %d seeds", seeds*commands, seeds)
}

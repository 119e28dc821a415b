package ledger_test

import (
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger/ledgertest"
)

// soak returns the number in the environment variable name, or normal if the variable is not set.
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

// TestLedgerMatchesTheModel executes random commands on the ledger and on a naive model. The results must be equal, and
// audits must find no problem. The environment variables TRIVET_LEDGER_COMMANDS and TRIVET_LEDGER_SEEDS set the total
// number of commands and the number of seeds.
func TestLedgerMatchesTheModel(t *testing.T) {
	seeds := soak(t, "TRIVET_LEDGER_SEEDS", 500)
	commands := soak(t, "TRIVET_LEDGER_COMMANDS", 500_000) / seeds
	for seed := range uint64(seeds) {
		require.NoError(t, ledgertest.Run(seed, commands, ledgertest.NewMemory()))
	}
	t.Logf("%d commands over %d seeds", seeds*commands, seeds)
}

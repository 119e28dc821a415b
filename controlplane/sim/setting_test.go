package sim_test

import (
	"maps"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/sim"
)

// setting returns the number in an environment variable; given is false if the variable is empty.
func setting(t *testing.T, variable string) (n uint64, given bool) {
	text := os.Getenv(variable)
	if text == "" {
		return 0, false
	}
	n, err := strconv.ParseUint(text, 10, 64)
	require.NoError(t, err, variable)
	return n, true
}

// save writes the trace to the file that TRIVET_SIM_TRACE names, if it is set.
func save(t *testing.T, trace string) {
	if path := os.Getenv(sim.TraceVariable); path != "" {
		require.NoError(t, os.WriteFile(path, []byte(trace), 0o600))
	}
}

func add(total, counts map[string]int) {
	for what, n := range counts {
		total[what] += n
	}
}

func list(t *testing.T, total map[string]int) {
	for _, what := range slices.Sorted(maps.Keys(total)) {
		t.Logf("%8d %s", total[what], what)
	}
}

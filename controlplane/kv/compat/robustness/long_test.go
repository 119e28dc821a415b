//go:build long

package robustness

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// etcd returns the server etcd with the program that ../build builds.
func etcd(t *testing.T) Etcd {
	t.Helper()
	out, err := exec.Command("../build").CombinedOutput()
	require.NoError(t, err, "%s", out)
	path, err := filepath.Abs("../../../../.build/etcd/etcd")
	require.NoError(t, err)
	return Etcd{path}
}

// TestEtcd checks that etcd itself breaks no guarantee in rounds of faults, which shows that the suite is correct.
func TestEtcd(t *testing.T) {
	runRounds(t, etcd(t), defaultDuration)
}

// TestMutantsAreNoticed checks that the suite reports a violation within maxRounds for each program with a broken rule.
// One round may not suffice: a client observes the violation only if a fault happens at the right moment.
func TestMutantsAreNoticed(t *testing.T) {
	const maxRounds = 10
	binary := build(t, "-tags", "mutant")
	for name, faults := range map[string][]string{
		"stale-read":    {"cut off leader", "pause leader", "drop packets from leader"},
		"skip-log-sync": {"power failure of all", "power failure of leader", "power failure of all"},
	} {
		t.Run(name, func(t *testing.T) {
			first := seed(t)
			for n := range uint64(maxRounds) {
				r := newRound(t, Trivet{Binary: binary, Mutant: name}, first+n)
				r.Faults = faults
				r.Compact = false // etcd's compaction traffic panics if an acknowledged write is lost
				if _, err := runRound(t, r); IsViolation(err) {
					return
				}
			}
			t.Fatalf("%d rounds reported no violation", maxRounds)
		})
	}
}

//go:build long

package robustness

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// etcd is etcd's program, built by ../build.
func etcd(t *testing.T) Etcd {
	t.Helper()
	out, err := exec.Command("../build").CombinedOutput()
	require.NoError(t, err, "%s", out)
	path, err := filepath.Abs("../../../../.build/etcd/etcd")
	require.NoError(t, err)
	return Etcd{path}
}

// The suite finds nothing wrong with etcd.
func TestEtcd(t *testing.T) {
	runRounds(t, etcd(t), defaultDuration)
}

// Each rule that is broken on purpose is noticed. Not at once: what a client sees of it takes a fault at the right
// moment.
func TestMutantsAreNoticed(t *testing.T) {
	const maxRounds = 10
	binary := build(t, "-tags", "mutant")
	for name, faults := range map[string][]string{
		"stale-read":    {"cut off leader", "pause leader", "leader is not heard"},
		"skip-log-sync": {"power fails", "power fails at leader", "power fails"},
	} {
		t.Run(name, func(t *testing.T) {
			first := seed(t)
			for n := range uint64(maxRounds) {
				r := newRound(t, Trivet{Binary: binary, Mutant: name}, first+n)
				r.Faults = faults
				if _, err := runRound(t, r); IsViolation(err) {
					return
				}
			}
			t.Fatalf("%d rounds found nothing", maxRounds)
		})
	}
}

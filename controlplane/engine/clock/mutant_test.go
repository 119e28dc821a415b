//go:build mutant

package clock

import (
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// The tests fail with the mutant that ignores the other members' clocks.
func TestMutantOwnClock(t *testing.T) {
	mutant.Set(mutant.OwnClock)
	defer mutant.Set("")
	synctest.Test(t, func(t *testing.T) {
		h := newTestCluster(t, 3)
		h.round(1)
		h.ahead[1] = 10 * time.Minute
		require.Greater(t, time.Until(h.clocks[1].Now()), 9*time.Minute)
	})
}

// The file that TRIVET_CLOCK names sets the offset of Wall at once. The file may be missing.
func TestMutantWall(t *testing.T) {
	dir := t.TempDir()
	require.Zero(t, ahead(dir+"/none"))
	for text, want := range map[string]time.Duration{"": 0, "\n": 0, "10m\n": 10 * time.Minute, "-1m0s": -time.Minute} {
		write(t, dir+"/clock", text)
		require.Equal(t, want, ahead(dir+"/clock"), text)
	}
	write(t, dir+"/clock", "noon")
	require.Panics(t, func() { ahead(dir + "/clock") })
}

func write(t *testing.T, path, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}

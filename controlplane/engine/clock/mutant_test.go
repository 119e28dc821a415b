//go:build mutant

package clock

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutantOwnClock checks that two tests fail with the mutant OwnClock, whose member uses its wall clock without
// correction.
func TestMutantOwnClock(t *testing.T) {
	mutanttest.Notices(t, mutant.OwnClock, TestWrongClockIsCorrectedInOneRound, "Max difference between 0 and 600")
	mutanttest.Notices(t, mutant.OwnClock, TestTwoClocksGiveNoMajority, "Now continues with the correct time")
}

// TestMutantWall checks that the file that TRIVET_CLOCK names sets the offset of Wall: missing and empty mean 0, a
// malformed duration panics.
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

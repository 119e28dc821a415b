//go:build mutant

package clock

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"time"
)

// fromEnvironment returns the value of the environment variable TRIVET_CLOCK, which is the path of a file. The file
// contains how far this program's clock is ahead of the host's, as a Go duration ("10m", "-1m0s"). Tests may replace
// the file at any time, preferably by renaming. A missing or empty file means 0. Programs built without the tag mutant
// ignore TRIVET_CLOCK.
var fromEnvironment = sync.OnceValue(func() string { return os.Getenv("TRIVET_CLOCK") })

// Wall returns this host's wall clock plus the offset in the file that TRIVET_CLOCK names. If TRIVET_CLOCK is set, the
// result has no monotonic clock reading: a monotonic reading would hide a change of the offset from time.Since.
func Wall() time.Time {
	path := fromEnvironment()
	if path == "" {
		return time.Now()
	}
	return time.Now().Add(ahead(path)).Round(0)
}

func ahead(path string) time.Duration {
	text, err := os.ReadFile(path)
	if err != nil || len(strings.TrimSpace(string(text))) == 0 {
		return 0
	}
	d, err := time.ParseDuration(strings.TrimSpace(string(text)))
	if err != nil {
		// Panic here: if an invalid setting were ignored, a test of a wrong clock would pass without testing anything.
		panic(fmt.Sprintf("TRIVET_CLOCK %s: %v", path, err))
	}
	return d
}

//go:build mutant

package clock

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"time"
)

// TRIVET_CLOCK names a file that holds how far this program's clock is ahead of the host's, as Go writes durations ("10m",
// "-1m0s"). It may change at any time, best by renaming; none, or an empty one, is 0. In a normal build it says nothing.
var fromEnvironment = sync.OnceValue(func() string { return os.Getenv("TRIVET_CLOCK") })

// Wall is this host's clock, as far as who runs the program wants it to be. It carries no reading of the monotonic clock:
// that does not follow when a clock is set.
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
		// A test that believes to have set a clock and has not would prove nothing.
		panic(fmt.Sprintf("TRIVET_CLOCK %s: %v", path, err))
	}
	return d
}

//go:build mutant

package clock

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"time"
)

// fromEnvironment returns the environment variable TRIVET_CLOCK: the path of a file with the offset of this program's
// clock from the host's, as a Go duration ("10m", "-1m0s"). The file may change at any time, preferably by renaming. A
// missing or empty file means 0. Without the build tag mutant, TRIVET_CLOCK has no effect.
var fromEnvironment = sync.OnceValue(func() string { return os.Getenv("TRIVET_CLOCK") })

// Wall returns this host's wall clock plus the offset in the file TRIVET_CLOCK. With an offset the result has no
// monotonic clock reading, because that does not change when a clock is set.
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
		// Panic, because a test whose clock setting is ignored would pass without testing anything.
		panic(fmt.Sprintf("TRIVET_CLOCK %s: %v", path, err))
	}
	return d
}

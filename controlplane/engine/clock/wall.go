//go:build !mutant

package clock

import "time"

// Wall returns this host's wall clock.
func Wall() time.Time { return time.Now() }

//go:build mutant

package mutant

import (
	"os"
	"sync"
	"sync/atomic"
)

var active atomic.Pointer[string]

// fromEnvironment returns TRIVET_MUTANT, the mutant of a program that runs as a process of its own in a test.
var fromEnvironment = sync.OnceValue(func() string { return os.Getenv("TRIVET_MUTANT") })

// On reports whether the named mutant is active.
func On(name string) bool {
	if p := active.Load(); p != nil {
		return *p == name
	}
	return fromEnvironment() == name
}

// Set activates one mutant; the empty name activates none.
func Set(name string) { active.Store(&name) }

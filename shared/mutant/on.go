//go:build mutant

package mutant

import (
	"os"
	"sync"
	"sync/atomic"
)

var active atomic.Pointer[string]

const variable = "TRIVET_MUTANT"

// fromEnvironment returns TRIVET_MUTANT, the mutant of a program that runs as a process of its own in a test.
var fromEnvironment = sync.OnceValue(func() string { return os.Getenv(variable) })

// On reports whether the named mutant is active.
func On(name string) bool {
	if p := active.Load(); p != nil {
		return *p == name
	}
	return fromEnvironment() == name
}

// Environ returns the environment variable that activates the active mutant in a child process, or nothing.
func Environ() []string {
	name := fromEnvironment()
	if p := active.Load(); p != nil {
		name = *p
	}
	if name == "" {
		return nil
	}
	return []string{variable + "=" + name}
}

// Set activates one mutant; the empty name activates none.
func Set(name string) { active.Store(&name) }

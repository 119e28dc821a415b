//go:build mutant

package mutant

import (
	"os"
	"sync"
	"sync/atomic"
)

var active atomic.Pointer[string]

const variable = "TRIVET_MUTANT"

// fromEnvironment returns the value of the environment variable TRIVET_MUTANT. A test sets it to a mutant's name when
// it starts a program as a child process.
var fromEnvironment = sync.OnceValue(func() string { return os.Getenv(variable) })

// On reports whether the named mutant is active. The active mutant is the one given to Set. If Set was not called, it
// is the one in TRIVET_MUTANT.
func On(name string) bool {
	if p := active.Load(); p != nil {
		return *p == name
	}
	return fromEnvironment() == name
}

// Environ returns the environment variable, in the form "TRIVET_MUTANT=name", that activates this process's mutant in a
// child process. It returns nil if no mutant is active.
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

// Set activates the named mutant in this process and deactivates the one that was active. With an empty name it only
// deactivates.
func Set(name string) { active.Store(&name) }

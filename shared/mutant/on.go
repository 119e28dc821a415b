//go:build mutant

package mutant

import "sync/atomic"

var active atomic.Pointer[string]

// On reports whether the named mutant is active.
func On(name string) bool {
	p := active.Load()
	return p != nil && *p == name
}

// Set activates one mutant; the empty name activates none.
func Set(name string) { active.Store(&name) }

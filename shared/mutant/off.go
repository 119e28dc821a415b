//go:build !mutant

package mutant

// On always returns false: this build disables no safety rule.
func On(string) bool { return false }

// Environ returns nil: this build has no mutant to activate in a child process.
func Environ() []string { return nil }

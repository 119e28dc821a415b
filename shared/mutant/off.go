//go:build !mutant

package mutant

// On always returns false: this build disables no safety rule.
func On(string) bool { return false }

// Environ returns nothing in this build.
func Environ() []string { return nil }

//go:build !mutant

package mutant

// On is false: this build keeps every rule.
func On(string) bool { return false }

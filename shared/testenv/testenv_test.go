package testenv

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// outcome is a testing.TB that records how Skip ends the test.
type outcome struct {
	testing.TB
	skipped, failed string
}

func (o *outcome) Helper()           {}
func (o *outcome) Skip(args ...any)  { o.skipped = args[0].(string) }
func (o *outcome) Fatal(args ...any) { o.failed = args[0].(string) }

// TestSkipFailsInCI checks that a test that cannot run is skipped, and fails with CI=true.
func TestSkipFailsInCI(t *testing.T) {
	t.Setenv("CI", "")
	o := &outcome{}
	Program(o, "a program that is not installed")
	require.Contains(t, o.skipped, "executable file not found")
	require.Empty(t, o.failed)
	t.Setenv("CI", "true")
	o = &outcome{}
	Program(o, "a program that is not installed")
	require.Contains(t, o.failed, "executable file not found")
}

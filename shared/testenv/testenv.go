// Package testenv skips tests for which the machine lacks something, such as root or an installed program. With CI=true
// in the environment these tests fail instead, so that a run in continuous integration cannot leave them out.
package testenv

import (
	"os"
	"os/exec"
	"testing"
)

// Skip skips the test, or fails it if CI=true. why says what the machine lacks.
func Skip(t testing.TB, why string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// NeedRoot skips the test unless it runs as root.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		Skip(t, "this test needs root")
	}
}

// Program returns the path of an installed program. It skips the test if there is none.
func Program(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Skip(t, err.Error())
	}
	return path
}

// Package testenv skips tests whose requirements the machine does not meet, such as root or an installed program. If
// the environment has CI=true, these tests fail instead, so that continuous integration never skips them. It also makes
// the disk from which guests of tests start QEMU's guest agent.
package testenv

import (
	"os"
	"os/exec"
	"testing"
)

// Skip skips the test, or fails it if CI=true. why is the missing requirement.
func Skip(t testing.TB, why string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// NeedRoot skips the test like Skip unless it runs as root.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		Skip(t, "this test needs root")
	}
}

// Program returns the path of an installed program. If PATH has no such program, it skips the test like Skip.
func Program(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Skip(t, err.Error())
	}
	return path
}

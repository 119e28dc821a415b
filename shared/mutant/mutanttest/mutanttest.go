// Package mutanttest checks that an ordinary test fails when a mutant is active.
//
// The ordinary test is run unchanged in two processes: one without a mutant, in which it must pass, and one with
// TRIVET_MUTANT set, in which it must fail. So the test that detects the mutant is the one that runs in every build. If
// TRIVET_MUTANTS_ONLY is set, the first process is left out, for a build that runs the ordinary tests anyway.
// The package is for tests with the build tag mutant. It imports no other package of Trivet.
package mutanttest

import (
	"bytes"
	"os"
	"os/exec"
	"reflect"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"
)

// timeout is the time limit for running a test. A mutant can make the test hang. A test that exceeds the limit does not
// count as failed.
const timeout = "2m"

// passed holds the names of the tests that have passed without a mutant, so that each test is run only once without
// one.
var passed sync.Map

// Notices runs the function test, a test of the same package, in two child processes (one if TRIVET_MUTANTS_ONLY is
// set). It fails t if the test fails without a mutant, or passes with the named mutant. The output of the failed test
// must contain all of texts, which shows that it failed for the expected reason.
func Notices(t *testing.T, mutant string, test func(*testing.T), texts ...string) {
	t.Helper()
	name := runtime.FuncForPC(reflect.ValueOf(test).Pointer()).Name()
	name = name[strings.LastIndexByte(name, '.')+1:]
	if _, done := passed.Load(name); !done && os.Getenv("TRIVET_MUTANTS_ONLY") == "" {
		if output, err := run(t, name, ""); err != nil || !regexp.MustCompile(`(?m)^--- PASS: `+name+` `).Match(output) {
			t.Fatalf("%s does not pass without a mutant: %v\n%s", name, err, output)
		}
		passed.Store(name, true)
	}
	output, err := run(t, name, mutant)
	if err == nil {
		t.Errorf("%s passes with the mutant %s", name, mutant)
		return
	}
	if !regexp.MustCompile(`(?m)^--- FAIL: ` + name + ` `).Match(output) {
		t.Errorf("%s with the mutant %s did not fail but ended with %v\n%s", name, mutant, err, output)
		return
	}
	for _, text := range texts {
		if !bytes.Contains(output, []byte(text)) {
			t.Errorf("%s with the mutant %s failed, but not with %q\n%s", name, mutant, text, output)
		}
	}
}

// run runs the named test of this program in a child process with the named mutant, and returns the output.
func run(t *testing.T, name, mutant string) ([]byte, error) {
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), program, "-test.run=^"+name+"$", "-test.count=1", "-test.v", "-test.timeout="+timeout)
	c.Env = append(os.Environ(), "TRIVET_MUTANT="+mutant)
	return c.CombinedOutput()
}

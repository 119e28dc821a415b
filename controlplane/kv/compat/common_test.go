package compat

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	// suite is the import path of the tests that etcd runs against every kind of cluster.
	suite = "go.etcd.io/etcd/tests/v3/common"
	// listFile lists the expected result of each test and subtest.
	listFile = "expected.txt"
	// suiteTime is the timeout of one run.
	suiteTime = 30 * time.Minute
)

// slow lists the top-level tests that run only with COMPAT=all, with their duration against etcd in seconds. They are a
// fifth of the tests and take seven tenths of the time, most of which they wait.
var slow = map[string]int{
	"TestMemberAdd": 78, "TestAuthority": 75, "TestMemberRemove": 33, "TestVerifyHashKVAfterCompact": 20, "TestUserAdd_Simple": 16,
	"TestKVDelete": 11, "TestLeaseGrantAndList": 11, "TestVerifyHashKVAfterCompactOnLastTombstone": 10, "TestAuthJWTExpire": 10,
	"TestLeaseGrantTimeToLiveExpired": 9, "TestLeaseGrantKeepAliveOnce": 9, "TestCompact": 8, "TestWaitLeader_MemberStop": 7,
	"TestStatusWithUserAuth": 6, "TestStatusWithRootAuth": 6, "TestDefragmentWithUserAuth": 6, "TestDefragmentWithRootAuth": 5,
	"TestVerifyHashKVAfterTwoCompactsOnTombstone": 6, "TestUserDelete": 5, "TestRoleAdd_Simple": 5,
}

var rewrite = flag.Bool("rewrite", false, "write the results to "+listFile)

// TestCommon runs etcd's tests/common, which start the program etcd and call it with etcdctl, and checks that the
// results equal those in listFile. The program etcd is the wrapper in the directory etcd, which runs Trivet.
//
// COMPAT=all runs all tests; otherwise the tests in slow are left out. COMPAT_RUN replaces the -run pattern. COMPAT_BIN
// names a directory with other programs etcd, etcdctl and etcdutl, such as .build/etcd to run the tests against etcd
// itself.
func TestCommon(t *testing.T) {
	if os.Geteuid() != 0 {
		const why = "a network namespace of its own needs root"
		if os.Getenv("CI") == "true" {
			t.Fatal(why)
		}
		t.Skip(why)
	}
	list := readList(t)
	program, directory := compileSuite(t)
	run := os.Getenv("COMPAT_RUN")
	if run == "" {
		run = "^(" + strings.Join(slices.DeleteFunc(topLevelTests(t, program, directory), func(name string) bool {
			return slow[name] > 0 && os.Getenv("COMPAT") != "all"
		}), "|") + ")$"
	}
	bin := buildPrograms(t)
	got := runSuite(t, program, directory, bin, run)
	if *rewrite {
		maps.DeleteFunc(list, func(name, _ string) bool { return selects(run, name) })
		maps.Copy(list, got)
		writeList(t, list)
		return
	}
	repeatMismatches(t, list, got, run, func(run string) map[string]string { return runSuite(t, program, directory, bin, run) })
	for _, m := range mismatches(list, got, run) {
		t.Error(m)
	}
	t.Logf("of %d tests %d passed, %d failed, %d skipped themselves", len(got), count(got, "pass"), count(got, "fail"), count(got, "skip"))
}

func count(list map[string]string, result string) (n int) {
	for _, r := range list {
		if r == result {
			n++
		}
	}
	return n
}

// selects reports whether a -run pattern selects a test or subtest. Like package testing it splits the pattern and the
// name at slashes, but it does not support slashes in brackets.
func selects(run, name string) bool {
	patterns := strings.Split(run, "/")
	for i, part := range strings.Split(name, "/") {
		if i < len(patterns) && !regexp.MustCompile(patterns[i]).MatchString(part) {
			return false
		}
	}
	return true
}

// mismatch is a test whose result is not the one in listFile.
type mismatch struct {
	name      string
	want, got string // "" means that the test is not listed, or did not run
}

func (m mismatch) String() string {
	switch {
	case m.want == "":
		return fmt.Sprintf("%s: %s, but it is not listed in %s", m.name, m.got, listFile)
	case m.got == "":
		return fmt.Sprintf("%s: did not run, but %s lists it as %q", m.name, listFile, m.want)
	}
	return fmt.Sprintf("%s: %s, but %s lists it as %q", m.name, m.got, listFile, m.want)
}

// mismatches returns the tests that the -run pattern selects and whose result is not the listed one, that did not run,
// or that are not listed. They are sorted by name.
func mismatches(list, got map[string]string, run string) (out []mismatch) {
	names := map[string]bool{}
	for name := range got {
		names[name] = true
	}
	for name := range list {
		if selects(run, name) {
			names[name] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if list[name] != got[name] {
			out = append(out, mismatch{name, list[name], got[name]})
		}
	}
	return out
}

// repeatMismatches runs the top-level tests with a mismatch once more and replaces their results in got. The suite has
// timeouts that a busy machine may exceed, and skips tests after one that left a process or file behind.
func repeatMismatches(t *testing.T, list, got map[string]string, run string, runSuite func(run string) map[string]string) {
	t.Helper()
	top := func(name string) string { name, _, _ = strings.Cut(name, "/"); return name }
	repeat := map[string]bool{}
	for _, m := range mismatches(list, got, run) {
		repeat[top(m.name)] = true
	}
	if len(repeat) == 0 {
		return
	}
	names := slices.Sorted(maps.Keys(repeat))
	t.Logf("repeat: %s", strings.Join(names, " "))
	maps.DeleteFunc(got, func(name, _ string) bool { return repeat[top(name)] })
	_, subtests, _ := strings.Cut(run, "/")
	repeatRun := "^(" + strings.Join(names, "|") + ")$"
	if subtests != "" {
		repeatRun += "/" + subtests
	}
	maps.Copy(got, runSuite(repeatRun))
}

// TestMismatches checks that mismatches returns every kind of difference, and only for selected tests.
func TestMismatches(t *testing.T) {
	list := map[string]string{
		"TestA": "pass", "TestA/x": "pass", "TestA/y": "skip", "TestB": "fail", "TestC": "skip", "TestD": "pass", "TestE": "fail", "TestF": "pass",
	}
	got := map[string]string{"TestA": "pass", "TestA/x": "fail", "TestB": "pass", "TestC": "fail", "TestE": "fail", "TestG": "skip"}
	require.Equal(t, []mismatch{
		{"TestA/x", "pass", "fail"}, {"TestA/y", "skip", ""}, {"TestB", "fail", "pass"}, {"TestC", "skip", "fail"}, {"TestD", "pass", ""}, {"TestG", "", "skip"},
	}, mismatches(list, got, "^Test[A-E]$"))
	require.Empty(t, mismatches(list, map[string]string{"TestA": "pass", "TestA/x": "pass"}, "^TestA$/^x$"))
}

// TestReadmeCounts checks that the numbers of tests in README.md agree with listFile.
func TestReadmeCounts(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	list := readList(t)
	row := func(include func(name string) bool) string {
		tops, part := map[string]bool{}, map[string]string{}
		for name, result := range list {
			if top, _, _ := strings.Cut(name, "/"); include(top) {
				tops[top], part[name] = true, result
			}
		}
		return fmt.Sprintf("| %d | %d | %d | %d | %d |", len(tops), len(part), count(part, "pass"), count(part, "fail"), count(part, "skip"))
	}
	require.Contains(t, string(readme), row(func(name string) bool { return slow[name] == 0 }))
	require.Contains(t, string(readme), row(func(name string) bool { return slow[name] > 0 }))
	require.Contains(t, string(readme), "| together "+row(func(string) bool { return true }))
}

func readList(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(listFile)
	require.NoError(t, err)
	list := map[string]string{}
	for _, line := range strings.Split(string(text), "\n") {
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		result, name, ok := strings.Cut(line, " ")
		require.True(t, ok && slices.Contains([]string{"pass", "fail", "skip"}, result), "%s: %q", listFile, line)
		list[name] = result
	}
	return list
}

func writeList(t *testing.T, list map[string]string) {
	t.Helper()
	var text strings.Builder
	fmt.Fprintf(&text, "# %s, written by `go test -run TestCommon -rewrite`: the expected result of each test. README.md gives the reasons of failures.\n", suite)
	for _, name := range slices.Sorted(maps.Keys(list)) {
		fmt.Fprintf(&text, "%s %s\n", list[name], name)
	}
	require.NoError(t, os.WriteFile(listFile, []byte(text.String()), 0o644))
}

// compileSuite compiles the suite. It returns the path of the test binary and the directory that the binary must run
// in.
func compileSuite(t *testing.T) (program, directory string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "common.test")
	out, err := exec.Command("go", "test", "-c", "-tags", "e2e", "-o", program, suite).CombinedOutput()
	require.NoError(t, err, "%s", out)
	found, err := exec.Command("go", "list", "-f", "{{.Dir}}", suite).Output()
	require.NoError(t, err)
	return program, strings.TrimSpace(string(found))
}

// topLevelTests returns the names of the suite's top-level tests.
func topLevelTests(t *testing.T, program, directory string) []string {
	t.Helper()
	c := exec.Command(program, "-test.list", ".", "-bin-dir", ".")
	c.Dir = directory
	out, err := c.Output()
	require.NoError(t, err)
	var names []string
	for _, line := range strings.Fields(string(out)) {
		if strings.HasPrefix(line, "Test") {
			names = append(names, line)
		}
	}
	require.NotEmpty(t, names)
	return names
}

// buildPrograms returns a directory with the wrapper as the program etcd, trivet-controlplane, and etcd's own etcdctl
// and etcdutl.
func buildPrograms(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("COMPAT_BIN"); dir != "" {
		dir, err := filepath.Abs(dir)
		require.NoError(t, err)
		return dir
	}
	tools, err := filepath.Abs("../../../.build/etcd")
	require.NoError(t, err)
	out, err := exec.Command("./build").CombinedOutput()
	require.NoError(t, err, "%s", out)
	dir := t.TempDir()
	for _, name := range []string{"etcdctl", "etcdutl"} {
		require.NoError(t, os.Symlink(filepath.Join(tools, name), filepath.Join(dir, name)))
	}
	goBuild(t, ".", "-o", filepath.Join(dir, "etcd"), "./etcd")
	controlPlane := filepath.Join(dir, "trivet-controlplane")
	if prebuilt := os.Getenv("TRIVET_BIN"); prebuilt != "" {
		require.NoError(t, os.Symlink(filepath.Join(prebuilt, "trivet-controlplane"), controlPlane))
	} else {
		goBuild(t, "../../..", "-o", controlPlane, "./controlplane")
	}
	return dir
}

func goBuild(t *testing.T, dir string, args ...string) {
	t.Helper()
	c := exec.Command("go", append([]string{"build", "-trimpath"}, args...)...)
	c.Dir, c.Env = dir, append(os.Environ(), "CGO_ENABLED=0")
	out, err := c.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// event is a line of the output of test2json.
type event struct {
	Action, Test, Output string
	Elapsed              float64
}

// runSuite runs the tests that the -run pattern selects, in a network namespace where all ports are free, and returns
// the result of each test and subtest. It logs the reason of each failure.
func runSuite(t *testing.T, program, directory, bin, run string) map[string]string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), suiteTime)
	defer cancel()
	c := exec.CommandContext(ctx, "sh", "-c", `ip link set lo up && exec "$@"`, "sh",
		"go", "tool", "test2json", "-t", program, "-test.v=test2json", "-test.timeout", suiteTime.String(), "-test.run", run, "-bin-dir="+bin)
	c.Dir = directory
	c.Env = append(os.Environ(), "E2E_TEST_MINIMAL=true")
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	results, outputs := map[string]string{}, map[string]*strings.Builder{}
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		var e event
		if json.Unmarshal(line, &e) != nil || e.Test == "" {
			stderr.Write(line)
			continue
		}
		switch e.Action {
		case "output":
			if outputs[e.Test] == nil {
				outputs[e.Test] = &strings.Builder{}
			}
			outputs[e.Test].WriteString(e.Output)
		case "run":
			results[e.Test] = "fail" // until the test ends
		case "pass", "fail", "skip":
			results[e.Test] = e.Action
			if e.Action == "fail" {
				t.Logf("FAIL %s (%.1f s): %s", e.Test, e.Elapsed, failureLine(outputs[e.Test]))
			}
			keepLog(t, e.Test, e.Action, outputs[e.Test])
			delete(outputs, e.Test)
		}
	}
	c.Wait() // an error means that a test failed, which is in results
	require.NotEmpty(t, results, "%s", stderr.String())
	return results
}

// failureLine returns the line of a test's output that explains its failure: the first "Error:", or else the last line
// that mentions a panic or a test file.
func failureLine(output *strings.Builder) string {
	if output == nil {
		return ""
	}
	var last string
	for _, line := range strings.Split(output.String(), "\n") {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "Error:") || strings.Contains(line, "panic") || strings.Contains(line, "_test.go") {
			last = line
		}
		if strings.HasPrefix(line, "Error:") {
			break
		}
	}
	return last
}

// keepLog writes the output of a failed test to the directory COMPAT_LOGS, if that is set.
func keepLog(t *testing.T, name, action string, output *strings.Builder) {
	t.Helper()
	dir := os.Getenv("COMPAT_LOGS")
	if dir == "" || action != "fail" || output == nil {
		return
	}
	file := regexp.MustCompile(`[^A-Za-z0-9]+`).ReplaceAllString(name, "-")
	require.NoError(t, os.WriteFile(filepath.Join(dir, file), []byte(output.String()), 0o644))
}

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
	// suite is etcd's tests of what a client may rely on, written once for all kinds of cluster.
	suite = "go.etcd.io/etcd/tests/v3/common"
	// listFile says what comes of each test.
	listFile = "expected.txt"
	// fewest is how many tests of the list pass at least. It never falls.
	fewest = 378
	// suiteTime bounds a run of the whole suite.
	suiteTime = 30 * time.Minute
)

// slow are the tests that only the whole run has, by how many seconds they take with etcd, mostly waiting: a fifth of the
// tests and seven tenths of the time.
var slow = map[string]int{
	"TestMemberAdd": 78, "TestAuthority": 75, "TestMemberRemove": 33, "TestVerifyHashKVAfterCompact": 20, "TestUserAdd_Simple": 16,
	"TestKVDelete": 11, "TestLeaseGrantAndList": 11, "TestVerifyHashKVAfterCompactOnLastTombstone": 10, "TestAuthJWTExpire": 10,
	"TestLeaseGrantTimeToLiveExpired": 9, "TestLeaseGrantKeepAliveOnce": 9, "TestCompact": 8, "TestWaitLeader_MemberStop": 7,
	"TestStatusWithUserAuth": 6, "TestStatusWithRootAuth": 6, "TestDefragmentWithUserAuth": 6, "TestDefragmentWithRootAuth": 5,
	"TestVerifyHashKVAfterTwoCompactsOnTombstone": 6, "TestUserDelete": 5, "TestRoleAdd_Simple": 5,
}

var rewrite = flag.Bool("rewrite", false, "write "+listFile+" anew from what happened")

// etcd's tests/common start `etcd` and talk to it by `etcdctl`. Here the first is ours. With COMPAT=all every test runs,
// otherwise those that are quick; COMPAT_RUN is a pattern of its own; COMPAT_BIN another directory with an etcd, an
// etcdctl and an etcdutl, such as .build/etcd to see that etcd passes.
func TestCommon(t *testing.T) {
	if os.Geteuid() != 0 {
		const why = "a network namespace of its own needs root"
		if os.Getenv("CI") == "true" {
			t.Fatal(why)
		}
		t.Skip(why)
	}
	list := readList(t)
	require.GreaterOrEqual(t, count(list, "pass"), fewest, "fewer tests are listed as passing than once did")
	program, directory := compileSuite(t)
	run := os.Getenv("COMPAT_RUN")
	if run == "" {
		run = "^(" + strings.Join(slices.DeleteFunc(topLevel(t, program, directory), func(name string) bool {
			return slow[name] > 0 && os.Getenv("COMPAT") != "all"
		}), "|") + ")$"
	}
	bin := programs(t)
	got := runSuite(t, program, directory, bin, run)
	again(t, list, got, func(run string) map[string]string { return runSuite(t, program, directory, bin, run) })
	compare(t, list, got, regexp.MustCompile(strings.SplitN(run, "/", 2)[0]))
	if *rewrite {
		maps.Copy(list, got)
		writeList(t, list)
	}
	t.Logf("of %d tests %d passed, %d failed, %d were skipped by themselves", len(got), count(got, "pass"), count(got, "fail"), count(got, "skip"))
}

func count(list map[string]string, result string) (n int) {
	for _, r := range list {
		if r == result {
			n++
		}
	}
	return n
}

// again repeats, once, what did not pass and is not listed as such: the suite has time-outs that a busy machine may miss,
// and skips tests after one that has left something behind.
func again(t *testing.T, list, got map[string]string, run func(string) map[string]string) {
	t.Helper()
	failed := map[string]bool{}
	for name, result := range got {
		if result != "pass" && result != list[name] && list[name] != "fail" && !(result == "skip" && list[name] == "") {
			top, _, _ := strings.Cut(name, "/")
			failed[top] = true
		}
	}
	if len(failed) == 0 {
		return
	}
	names := slices.Sorted(maps.Keys(failed))
	t.Logf("once more: %s", strings.Join(names, " "))
	maps.Copy(got, run("^("+strings.Join(names, "|")+")$"))
}

// compare says what differs from the list among the tests that ran was asked for.
func compare(t *testing.T, list, got map[string]string, ran *regexp.Regexp) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(list)) {
		top, _, _ := strings.Cut(name, "/")
		if !ran.MatchString(top) || *rewrite {
			continue
		}
		switch result := got[name]; {
		case result == list[name]:
		case list[name] == "pass":
			t.Errorf("%s should pass: %q", name, result)
		case result == "pass":
			t.Logf("%s passes now: -rewrite the list", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if list[name] == "" && !*rewrite {
			t.Errorf("%s is not listed: %s", name, got[name])
		}
	}
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
	fmt.Fprintf(&text, "# %s, by `go test -run TestCommon -rewrite`: what comes of each test. README.md gives reasons.\n", suite)
	for _, name := range slices.Sorted(maps.Keys(list)) {
		fmt.Fprintf(&text, "%s %s\n", list[name], name)
	}
	require.NoError(t, os.WriteFile(listFile, []byte(text.String()), 0o644))
}

// compileSuite compiles the suite and returns it with the directory that it wants to run in.
func compileSuite(t *testing.T) (program, directory string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "common.test")
	out, err := exec.Command("go", "test", "-c", "-tags", "e2e", "-o", program, suite).CombinedOutput()
	require.NoError(t, err, "%s", out)
	found, err := exec.Command("go", "list", "-f", "{{.Dir}}", suite).Output()
	require.NoError(t, err)
	return program, strings.TrimSpace(string(found))
}

// topLevel are the names of the suite's tests.
func topLevel(t *testing.T, program, directory string) []string {
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

// programs is a directory with an etcd that is ours, and etcd's own tools.
func programs(t *testing.T) string {
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
	ours := filepath.Join(dir, "trivet-controlplane")
	if built := os.Getenv("TRIVET_BIN"); built != "" {
		require.NoError(t, os.Symlink(filepath.Join(built, "trivet-controlplane"), ours))
	} else {
		goBuild(t, "../../..", "-o", ours, "./controlplane")
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

// event is a line of test2json.
type event struct {
	Action, Test, Output string
	Elapsed              float64
}

// runSuite runs the tests that match, in a network namespace where all ports are free, and returns the result of each
// test and subtest. What they said goes to a file beside the list of what failed.
func runSuite(t *testing.T, program, directory, bin, run string) map[string]string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), suiteTime)
	defer cancel()
	c := exec.CommandContext(ctx, "sh", "-c", `ip link set lo up && exec "$@"`, "sh",
		"go", "tool", "test2json", "-t", program, "-test.v=test2json", "-test.timeout", suiteTime.String(), "-test.run", run, "-bin-dir="+bin)
	c.Dir = directory
	c.Env = append(os.Environ(), "E2E_TEST_MINIMAL=true")
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
	var complaints bytes.Buffer
	c.Stderr = &complaints
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	results, said := map[string]string{}, map[string]*strings.Builder{}
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		var e event
		if json.Unmarshal(line, &e) != nil || e.Test == "" {
			complaints.Write(line)
			continue
		}
		switch e.Action {
		case "output":
			if said[e.Test] == nil {
				said[e.Test] = &strings.Builder{}
			}
			said[e.Test].WriteString(e.Output)
		case "run":
			results[e.Test] = "fail" // unless it comes to an end
		case "pass", "fail", "skip":
			results[e.Test] = e.Action
			if e.Action == "fail" {
				t.Logf("FAIL %s (%.1f s): %s", e.Test, e.Elapsed, reason(said[e.Test]))
			}
			keep(t, e.Test, e.Action, said[e.Test])
			delete(said, e.Test)
		}
	}
	c.Wait() // its verdict is in the results
	require.NotEmpty(t, results, "%s", complaints.String())
	return results
}

// reason is the line of a test's output that says most.
func reason(said *strings.Builder) string {
	if said == nil {
		return ""
	}
	var last string
	for _, line := range strings.Split(said.String(), "\n") {
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

// keep writes what a failed test said to COMPAT_LOGS, if that is a directory.
func keep(t *testing.T, name, action string, said *strings.Builder) {
	t.Helper()
	dir := os.Getenv("COMPAT_LOGS")
	if dir == "" || action != "fail" || said == nil {
		return
	}
	file := regexp.MustCompile(`[^A-Za-z0-9]+`).ReplaceAllString(name, "-")
	require.NoError(t, os.WriteFile(filepath.Join(dir, file), []byte(said.String()), 0o644))
}

package cgroup

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/testenv"
)

// kernelTree opens a tree for this test in the host's real cgroup file systems, and removes it at the end of the test.
func kernelTree(t *testing.T) *Tree {
	t.Helper()
	testenv.NeedRoot(t)
	tree, err := Open(fmt.Sprintf("trivet-test-cgroup-%d", os.Getpid()))
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		names, err := tree.List()
		require.NoError(t, err)
		for _, name := range names {
			require.NoError(t, tree.Kill(ctx, name))
			require.NoError(t, tree.Remove(ctx, name))
		}
		require.NoError(t, tree.Close())
	})
	return tree
}

// run starts a shell that enters the group and then runs script. It returns when the shell is in the group. The shell
// is killed at the end of the test.
func run(t *testing.T, tree *Tree, name, script string) *exec.Cmd {
	t.Helper()
	enter := ""
	for _, f := range tree.Entries(name) {
		enter += fmt.Sprintf("echo 0 > '%s' || exit 9; ", f)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", enter+"echo in; "+script)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	_, err = out.Read(make([]byte, 3))
	require.NoError(t, err)
	return cmd
}

func TestKernelGroups(t *testing.T) {
	tree := kernelTree(t)
	require.NoError(t, tree.Create("a", Limits{CPUs: 1, Memory: 64 << 20, Tasks: 50}))
	require.NoError(t, tree.Create("a", Limits{CPUs: 2, Memory: 128 << 20, Tasks: 60}), "Create of an existing group with other limits must succeed")
	names, err := tree.List()
	require.NoError(t, err)
	require.Equal(t, []string{"a"}, names)

	cmd := run(t, tree, "a", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; sleep 60 & sleep 60; true")
	procs, err := tree.Procs("a")
	require.NoError(t, err)
	require.Contains(t, procs, cmd.Process.Pid)
	require.ErrorIs(t, tree.Remove(t.Context(), "a"), syscall.EBUSY)

	require.NoError(t, tree.Kill(t.Context(), "a"))
	procs, err = tree.Procs("a")
	require.NoError(t, err)
	require.Empty(t, procs)
	require.ErrorContains(t, cmd.Wait(), "signal: killed")
	usage, err := tree.Usage("a")
	require.NoError(t, err)
	require.Positive(t, usage.CPU)
	require.Zero(t, usage.OOMKills)
	require.NoError(t, tree.Kill(t.Context(), "a"), "Kill of an empty group must succeed")
	require.NoError(t, tree.Remove(t.Context(), "a"))
}

func TestKernelKillsProcessesOverMemoryLimit(t *testing.T) {
	tree := kernelTree(t)
	require.NoError(t, tree.Create("small", Limits{CPUs: 1, Memory: 8 << 20}))
	cmd := run(t, tree, "small", "x=$(head -c 100000000 /dev/zero | tr '\\0' x)")
	require.ErrorContains(t, cmd.Wait(), "signal: killed")
	usage, err := tree.Usage("small")
	require.NoError(t, err)
	require.EqualValues(t, 1, usage.OOMKills)
}

func TestKernelKillGivesUp(t *testing.T) {
	tree := kernelTree(t)
	require.NoError(t, tree.Create("b", Limits{CPUs: 1, Memory: 64 << 20}))
	run(t, tree, "b", "sleep 60")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, tree.Kill(ctx, "b"), context.Canceled)
}

// TestKernelKillVersion2 checks Kill and Remove with the kernel's version 2 interface, also on a host where it is
// mounted without controllers, because they need none.
func TestKernelKillVersion2(t *testing.T) {
	testenv.NeedRoot(t)
	f, err := os.Open("/proc/self/mountinfo")
	require.NoError(t, err)
	defer f.Close()
	m, err := findMounts(f)
	require.NoError(t, err)
	if m.unified == "" {
		testenv.Skip(t, "no cgroup2 mount")
	}
	dir := filepath.Join(m.unified, fmt.Sprintf("trivet-test-kill-%d", os.Getpid()))
	tree := &Tree{version: 2, dirs: map[string]string{cpu: dir}, sys: system{mkdir: func(dir string) error { return os.Mkdir(dir, 0o755) }, rmdir: syscall.Rmdir}}
	require.NoError(t, tree.sys.mkdir(dir))
	t.Cleanup(func() { require.NoError(t, tree.Close()) })
	require.NoError(t, tree.sys.mkdir(filepath.Join(dir, "a")))
	cmd := run(t, tree, "a", "sleep 60 & sleep 60; true")
	require.NoError(t, tree.Kill(t.Context(), "a"))
	require.ErrorContains(t, cmd.Wait(), "signal: killed")
	require.NoError(t, tree.Remove(t.Context(), "a"))
}

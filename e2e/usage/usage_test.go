package usage

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestStat(t *testing.T) {
	// The process name, in parentheses, contains a parenthesis and text that looks like fields.
	got, err := parseStat([]byte("4242 (a ) b 1 2) S 1 4242 4242 0 -1 4194560 1 2 3 4 150 50 9 9 20 0 12 0 100 1 1\n"))
	require.NoError(t, err)
	require.Equal(t, 2*time.Second, got)
	_, err = parseStat([]byte("4242 (x) S 1 2"))
	require.EqualError(t, err, "3 fields after the name in stat")
	_, err = parseStat([]byte("4242 (x) S 1 2 3 4 5 6 7 8 9 10 minus 12"))
	require.ErrorContains(t, err, "times in stat")
}

func TestField(t *testing.T) {
	io := []byte("rchar: 1\nwchar: 2\nread_bytes: 3\nwrite_bytes: 4096\ncancelled_write_bytes: 7\n")
	got, err := parseField(io, "write_bytes")
	require.NoError(t, err)
	require.EqualValues(t, 4096, got)
	got, err = parseField([]byte("Name:\tVmRSS\nVmRSS:\t  12 kB\n"), "VmRSS")
	require.NoError(t, err)
	require.EqualValues(t, 12, got)
	_, err = parseField(io, "VmRSS")
	require.EqualError(t, err, "no VmRSS")
	_, err = parseField([]byte("VmRSS:\n"), "VmRSS")
	require.EqualError(t, err, "no VmRSS")
}

func TestBusyExcludesIdleAndGuestTime(t *testing.T) {
	got, err := parseBusy("cpu  100 10 20 9999 9999 1 2 3 50 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
	require.NoError(t, err)
	require.Equal(t, 136*tick, got)
	_, err = parseBusy("intr 1 2 3")
	require.ErrorContains(t, err, "no line cpu")
}

func TestUsageOfThisProcess(t *testing.T) {
	before, err := Of(os.Getpid())
	require.NoError(t, err)
	after, err := Of(os.Getpid(), os.Getpid())
	require.NoError(t, err)
	require.GreaterOrEqual(t, after.CPU, 2*before.CPU)
	m, err := MemoryOf(os.Getpid())
	require.NoError(t, err)
	require.Greater(t, m.Resident, m.Anonymous)
	_, err = Of(os.Getpid(), 1<<22+1) // higher than the kernel's highest possible pid
	require.ErrorContains(t, err, "read CPU time")
}

func TestTreeIncludesRunningAndEndedChildren(t *testing.T) {
	reader, writer, err := os.Pipe()
	require.NoError(t, err)
	defer reader.Close()
	// A shell with two children that use CPU: the first ends, the second then waits until the shell's input ends.
	cmd := exec.Command("sh", "-c", `i=0; (while [ $i -lt 60000 ]; do i=$((i+1)); done); (while [ $i -lt 60000 ]; do i=$((i+1)); done; echo; read x) & echo; read x`)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	cmd.Stdout = writer
	require.NoError(t, cmd.Start())
	require.NoError(t, writer.Close())
	lines := bufio.NewScanner(reader)
	for range 2 {
		require.True(t, lines.Scan())
	}
	alone, err := Of(cmd.Process.Pid)
	require.NoError(t, err)
	all, err := Tree(cmd.Process.Pid)
	require.NoError(t, err)
	require.Greater(t, all.CPU, alone.CPU)
	require.NoError(t, in.Close())
	_ = cmd.Wait() // the exit code is 1, because the shell's read found the end of its input
	_, err = Tree(cmd.Process.Pid)
	require.ErrorContains(t, err, "read children")
}

func TestDiskOf(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "a", "b"), 0o755))
	empty, err := DiskOf(dir)
	require.NoError(t, err)
	f, err := os.Create(filepath.Join(dir, "a", "b", "c"))
	require.NoError(t, err)
	defer f.Close()
	_, err = f.Write(make([]byte, 1<<20))
	require.NoError(t, err)
	require.NoError(t, f.Sync())
	full, err := DiskOf(dir)
	require.NoError(t, err)
	require.GreaterOrEqual(t, full-empty, uint64(1<<20))
}

package atomicfile

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// list returns the names of all files in dir.
func list(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestWriteFileReplacesContentAndMode(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	for _, perm := range []os.FileMode{0o600, 0o644, 0o400, 0o664} {
		require.NoError(t, WriteFile(path, []byte(perm.String()), perm))
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, perm.String(), string(text))
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, perm, info.Mode(), "the mode must be the given one, whatever the umask and the old mode are")
		require.Equal(t, []string{"a"}, list(t, dir))
	}
}

func TestFailedWriteKeepsTheOldFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	require.NoError(t, WriteFile(path, []byte("old"), 0o600))
	failed := errors.New("no more data")
	err := Write(path, 0o600, func(f *os.File) error {
		_, err := f.WriteString("half")
		require.NoError(t, err)
		return failed
	})
	require.Equal(t, failed, err)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "old", string(text))
	require.Equal(t, []string{"a"}, list(t, dir))
}

func TestErrorsNameTheTarget(t *testing.T) {
	dir := t.TempDir()
	missing := filepath.Join(dir, "missing", "a")
	require.EqualError(t, WriteFile(missing, nil, 0o600), "open "+missing+": no such file or directory")

	full := filepath.Join(dir, "directory")
	require.NoError(t, os.MkdirAll(filepath.Join(full, "x"), 0o700))
	require.EqualError(t, WriteFile(full, nil, 0o600), "rename "+full+": file exists")
	require.Equal(t, []string{"directory"}, list(t, dir))

	path := filepath.Join(dir, "a")
	err := Write(path, 0o600, func(f *os.File) error { return f.Truncate(-1) })
	require.EqualError(t, err, "truncate "+path+": invalid argument")
}

// TestReadersGetOneVersion reads a file while two goroutines replace it. Each read must return the complete content of
// one version.
func TestReadersGetOneVersion(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	version := func(n byte) []byte { return bytes.Repeat([]byte{n}, 1<<16) }
	require.NoError(t, WriteFile(path, version(0), 0o600))
	var writers sync.WaitGroup
	for w := range 2 {
		writers.Go(func() {
			for n := range 20 {
				if err := WriteFile(path, version(byte(20*w+n)), 0o600); err != nil {
					t.Error(err)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { writers.Wait(); close(done) }()
	for reading := true; reading; {
		select {
		case <-done:
			reading = false
		default:
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, version(text[0]), text)
	}
	require.Equal(t, []string{"a"}, list(t, filepath.Dir(path)))
}

// TestKilledWriter checks that a process that is killed during Write leaves the old file unchanged and a temporary
// file, which RemoveLeftovers removes. The test runs itself as that process.
func TestKilledWriter(t *testing.T) {
	if path := os.Getenv("TRIVET_TEST_KILLED_WRITER"); path != "" {
		_ = Write(path, 0o600, func(f *os.File) error {
			if _, err := f.WriteString("half"); err != nil {
				return err
			}
			return syscall.Kill(os.Getpid(), syscall.SIGKILL)
		})
		return
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "a.json")
	require.NoError(t, WriteFile(path, []byte("old"), 0o600))
	for range 2 {
		program := exec.Command(os.Args[0], "-test.run=^TestKilledWriter$")
		program.Env = append(os.Environ(), "TRIVET_TEST_KILLED_WRITER="+path)
		err := program.Run()
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
		require.Equal(t, syscall.SIGKILL, exit.Sys().(syscall.WaitStatus).Signal())
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "old", string(text))
	names := list(t, dir)
	require.Len(t, names, 3, "each killed process must leave a temporary file")
	for _, name := range names[:2] {
		require.True(t, strings.HasPrefix(name, ".a.json"), name)
	}

	require.NoError(t, WriteFile(path, []byte("new"), 0o600), "a temporary file must not make a later write fail")
	require.Len(t, list(t, dir), 3)
	require.NoError(t, RemoveLeftovers(dir))
	require.Equal(t, []string{"a.json"}, list(t, dir))
}

func TestRemoveLeftoversKeepsOtherFiles(t *testing.T) {
	dir := t.TempDir()
	keep := []string{".123456789012", ".a", ".a-1", ".a.json123", "a1234567890123456789", "a.new"}
	for _, name := range keep {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	require.NoError(t, os.Mkdir(filepath.Join(dir, ".d1234567890123456789"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, ".a.json1234567890123456789"), nil, 0o600))
	require.NoError(t, RemoveLeftovers(dir))
	require.ElementsMatch(t, append(keep, ".d1234567890123456789"), list(t, dir))

	require.NoError(t, RemoveLeftovers(filepath.Join(dir, "missing")))
}

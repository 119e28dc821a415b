package program

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestCheck(t *testing.T) {
	known := []string{"io", "clone"}
	require.NoError(t, Check([]string{"clone"}, known, 1))
	require.EqualError(t, Check([]string{"io", "disk"}, known, 1), `no part "disk"; there are io, clone`)
	require.EqualError(t, Check(known, known, 0), "one round at least")
}

// openedDir is the environment variable with the working directory for TestOpen, which then runs in new namespaces.
const openedDir = "TRIVET_PROGRAM_TEST_DIR"

// TestOpen runs itself in new namespaces, where Open mounts a file system and makes the directory, and Close removes
// the directory. The mount does not appear outside.
func TestOpen(t *testing.T) {
	if dir := os.Getenv(openedDir); dir != "" {
		open(t, dir)
		return
	}
	if os.Getuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	dir := t.TempDir()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestOpen$", "-test.v")
	cmd.Env = append(os.Environ(), openedDir+"="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "--- PASS: TestOpen")
	entries, err := os.ReadDir(filepath.Join(dir, "mounted"))
	require.NoError(t, err)
	require.Empty(t, entries, "the mount is private")
}

func open(t *testing.T, dir string) {
	t.Chdir(dir)
	path, mounted := "out.md", filepath.Join(dir, "mounted")
	r, err := Open(Options{Name: "test", Work: ".", Paths: []*string{&path}, Mounts: map[string]string{mounted: "tmpfs"}, Within: time.Hour})
	require.NoError(t, err)
	require.Equal(t, filepath.Join(dir, "out.md"), path)
	require.Equal(t, dir, filepath.Dir(r.Dir))
	info, err := os.Stat(r.Dir)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o755), info.Mode().Perm())
	require.NoError(t, os.WriteFile(filepath.Join(mounted, "file"), nil, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(r.Dir, "file"), nil, 0o600))
	require.NoError(t, r.Context.Err())
	require.NoError(t, r.Close())
	require.Error(t, r.Context.Err())
	require.NoDirExists(t, r.Dir)
}

package rbdtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// Program builds trivet-rbd and returns the path of the binary, which every user may execute. Program skips the test if
// the header files of librbd are not installed.
func Program(t testing.TB) string {
	t.Helper()
	if _, err := os.Stat("/usr/include/rbd/librbd.h"); err != nil {
		t.Skipf("librbd-dev is not installed: %v", err)
	}
	dir, err := os.MkdirTemp("", "trivet-rbdtest-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o755))
	path := filepath.Join(dir, "trivet-rbd")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-tags", "ceph,pacific", "-o", path,
		"github.com/trivet-cloud/trivet/nodeagent/rbd/trivet-rbd")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return path
}

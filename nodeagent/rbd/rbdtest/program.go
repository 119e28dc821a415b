package rbdtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
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

// Helpers returns the process ids of the processes trivet-rbd that the process parent has started.
func Helpers(t testing.TB, parent int) (pids []int) {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", parent))
	require.NoError(t, err)
	for _, task := range tasks {
		children, _ := os.ReadFile(task) // the thread may have ended
		for _, child := range strings.Fields(string(children)) {
			name, _ := os.ReadFile(filepath.Join("/proc", child, "comm")) // so may the process
			if pid, err := strconv.Atoi(child); err == nil && string(name) == "trivet-rbd\n" {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

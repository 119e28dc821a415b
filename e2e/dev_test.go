package e2e

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// TestDev checks that trivet-dev starts a cloud, that the commands which it prints work, and that nothing of the cloud
// is left when it has been interrupted.
func TestDev(t *testing.T) {
	bin, work := filepath.Dir(binaries(t).CLI), t.TempDir()
	require.NoError(t, os.Chmod(work, 0o755))
	program := filepath.Join(bin, "trivet-dev")
	if os.Getenv(binEnv) == "" {
		out, err := exec.Command("go", "build", "-trimpath", "-o", program, "./dev").CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	cgroup := fmt.Sprintf("trivet-e2e-dev-%d", lab.RunID())
	// The command of the control plane runs trivet-dev in place of itself.
	dev := exec.Command(filepath.Join(bin, "trivet-controlplane"), "dev", "--guest", guest(t), "--cgroup", cgroup, "--uid-range", uids())
	dev.Dir, dev.Env = work, append(os.Environ(), "TMPDIR="+work)
	printed, err := dev.StdoutPipe()
	require.NoError(t, err)
	dev.Stderr = os.Stderr
	require.NoError(t, dev.Start())
	defer dev.Process.Kill() // of a failed test; otherwise it has ended
	lines := bufio.NewScanner(printed)
	var out strings.Builder
	for !strings.Contains(out.String(), "catalog import") && lines.Scan() {
		out.WriteString(lines.Text() + "\n")
	}
	text, _, _ := strings.Cut(out.String(), "\nWith access to the Internet")
	_, export, found := strings.Cut(text, "In another terminal:\n")
	require.True(t, found, "%s", text)
	script := "set -e\n" + strings.Split(strings.TrimSpace(export), "\n")[0] + "\n"
	for _, command := range commandsOf(t, text) {
		script += fmt.Sprintf("echo '$ %s'\n%[1]s\n", command)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	shell := exec.CommandContext(ctx, "bash", "-c", script)
	shell.Dir, shell.Env = work, []string{"PATH=" + os.Getenv("PATH"), "HOME=" + work}
	answers, err := shell.CombinedOutput()
	require.NoError(t, err, "%s", answers)
	for _, want := range []string{`(?m)^ID: +demo`, `(?m)^greeting .*hello$`, `(?m)^web .*RUNNING`, `(?m)^devhost .*READY`, `(?m)^host +devhost`} {
		require.Regexp(t, want, string(answers))
	}

	require.NoError(t, dev.Process.Signal(syscall.SIGINT))
	for lines.Scan() {
	}
	require.NoError(t, dev.Wait())
	left, err := filepath.Glob(filepath.Join(work, "trivet-dev-*"))
	require.NoError(t, err)
	require.Empty(t, left)
	namespaces, err := filepath.Glob("/run/netns/trivetdev-*")
	require.NoError(t, err)
	require.Empty(t, namespaces)
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	for _, path := range processes {
		line, _ := os.ReadFile(path) // an error means that the process has ended
		require.NotContains(t, string(line), work+"/trivet-dev-")
		require.NotContains(t, string(line), cgroup)
	}
}

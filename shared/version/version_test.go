package version

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestChoose(t *testing.T) {
	for _, tc := range []struct{ stamped, recorded, want string }{
		{"1.2.3", "v0.0.0-2026", "1.2.3"},
		{"", "v1.2.3", "v1.2.3"},
		{"", "(devel)", "devel"},
		{"", "", "devel"},
	} {
		require.Equal(t, tc.want, choose(tc.stamped, tc.recorded))
	}
}

func TestLine(t *testing.T) {
	b := Build{Version: "1.2.3", Go: "go1.26.0", Platform: "linux/amd64"}
	require.Equal(t, "trivet 1.2.3 (go1.26.0, linux/amd64)", b.Line("trivet"))
}

// TestScript checks what .ci/version prints in a repository without a tag, at a tag, after it, and with changes, and
// outside of a repository.
func TestScript(t *testing.T) {
	script, err := os.ReadFile("../../.ci/version")
	require.NoError(t, err)
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, ".ci"), 0o755))
	path := filepath.Join(dir, ".ci", "version")
	require.NoError(t, os.WriteFile(path, script, 0o755))
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = dir
		// A repository above the directory, and settings of the user, must not matter.
		cmd.Env = append(os.Environ(), "GIT_CEILING_DIRECTORIES="+filepath.Dir(dir), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s: %s", args, out)
		return strings.TrimSpace(string(out))
	}
	commit := func() {
		t.Helper()
		run("git", "-c", "user.name=test", "-c", "user.email=test@example.com", "commit", "-q", "--allow-empty", "-m", "test")
	}
	matches := func(pattern string) {
		t.Helper()
		require.Regexp(t, regexp.MustCompile(`^`+pattern+`$`), run(path))
	}
	matches(`0\.0\.0\+unknown`)
	run("git", "init", "-q")
	run("git", "add", ".")
	commit()
	commit()
	matches(`0\.0\.0\+2\.g[0-9a-f]{8}`)
	run("git", "tag", "v1.2.3-rc1")
	matches(`1\.2\.3-rc1`)
	commit()
	matches(`1\.2\.3-rc1\+1\.g[0-9a-f]{8}`)
	require.NoError(t, os.WriteFile(path, append(script, '\n'), 0o755))
	matches(`1\.2\.3-rc1\+1\.g[0-9a-f]{8}\.dirty`)
	run("git", "tag", "other")
	run("git", "tag", "v1.2.3")
	matches(`1\.2\.3\+dirty`)
}

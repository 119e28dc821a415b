package e2e

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// beyond is an address outside of loopback.
const beyond = "10.9.8.7"

// moved, as an argument of newWorld, makes the cloud consist of one member with the address beyond.
func moved(w *world) {
	out, err := exec.Command("ip", "address", "add", beyond+"/32", "dev", "lo").CombinedOutput()
	require.NoError(w.t, err, "%s", out)
	w.t.Cleanup(func() {
		out, err := exec.Command("ip", "address", "del", beyond+"/32", "dev", "lo").CombinedOutput()
		require.NoError(w.t, err, "%s", out)
	})
	w.trio.Members = map[int]string{1: beyond}
}

// TestBeyondLoopback runs a member that other hosts can reach. It checks that the member serves over TLS, also on
// loopback, and that it serves plaintext only if operator and client both give --insecure-plaintext. The member then
// logs a warning.
func TestBeyondLoopback(t *testing.T) {
	password := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(password, []byte("correct horse"), 0o600))
	login := []string{"login", "--user", "ada", "--password-file", password, "--endpoint", beyond}
	t.Run("TLS", func(t *testing.T) {
		w := newWorld(t, moved, secured)
		ctx := w.context(time.Minute)
		w.tenant("ada", "default", "default", "project:member")
		_, errs, code := w.trivet(ctx, t.TempDir(), login...)
		require.Equal(t, 1, code)
		require.Contains(t, errs, "the password would be sent to "+beyond)
		_, errs, code = w.trivet(ctx, t.TempDir(), append(login, "--tls-ca", w.caFile())...)
		require.Zero(t, code, errs)
		local := &lab.REST{Host: "127.0.0.1", HTTP: w.https, Secure: true}
		a, err := local.Do(ctx, kvPort, http.MethodPut, "/api/v1/kv/a", map[string]string{"value": "1"})
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, a.Status, a.Raw)
		w.keys(ctx, 1, 403, http.MethodGet, "/api/v1/kv/a", nil)
	})
	t.Run("forced", func(t *testing.T) {
		w := newWorld(t, moved, func(w *world) { w.trio.Extra = []string{"--insecure-plaintext"} })
		ctx := w.context(time.Minute)
		w.tenant("ada", "default", "default", "project:member")
		log, err := os.ReadFile(w.dir.LogFile(w.trio.Name(1)))
		require.NoError(t, err)
		require.Contains(t, string(log), "INSECURE")
		home := t.TempDir()
		_, errs, code := w.trivet(ctx, home, append(login, "--insecure-plaintext")...)
		require.Zero(t, code, errs)
		_, errs, code = w.trivet(ctx, home, "vm", "list")
		require.Zero(t, code, errs)
	})
}

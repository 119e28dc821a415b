package e2e

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/keyring"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

// secrets maps descriptions to secrets that no file may contain. Secrets are random, so that compressed files contain
// them unchanged.
type secrets map[string][]byte

// found returns the descriptions of the secrets that a text contains.
func (s secrets) found(text []byte) (what []string) {
	for _, name := range slices.Sorted(maps.Keys(s)) {
		if bytes.Contains(text, s[name]) {
			what = append(what, name)
		}
	}
	return what
}

// addKey adds a binary key as four secrets: as it is, in hexadecimal, and in two variants of base64.
func (s secrets) addKey(name string, key []byte) {
	s[name] = key
	s[name+" in hex"] = []byte(hex.EncodeToString(key))
	s[name+" in base64"] = []byte(base64.RawStdEncoding.EncodeToString(key))
	s[name+" in base64 of URLs"] = []byte(base64.RawURLEncoding.EncodeToString(key))
}

func random() string {
	b := make([]byte, 18)
	rand.Read(b)
	return base64.RawURLEncoding.EncodeToString(b)
}

// commandLines returns the command lines of the agent and of all members, from /proc.
func (w *world) commandLines() (out []byte) {
	names := []string{w.agent.Name}
	for id := range w.trio.Members {
		names = append(names, w.trio.Name(id))
	}
	for _, name := range names {
		pid := w.dir.Running(name)
		require.NotZero(w.t, pid, name)
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		require.NoError(w.t, err)
		out = append(out, line...)
	}
	return out
}

// metrics returns the text of /metrics of the agent and of all members.
func (w *world) metrics() (out []byte) {
	ports := []string{w.agent.Metrics}
	for _, host := range w.trio.Members {
		ports = append(ports, host+":8084")
	}
	for _, port := range ports {
		resp, err := http.Get("http://" + port + "/metrics")
		require.NoError(w.t, err)
		text, err := io.ReadAll(resp.Body)
		require.NoError(w.t, err)
		require.NoError(w.t, resp.Body.Close())
		require.Equal(w.t, http.StatusOK, resp.StatusCode, port)
		out = append(out, text...)
	}
	return out
}

// records returns the keys and values of all versions of all records in the mvcc store in dir, which no process may
// have open, and the keyring from these records.
func records(t *testing.T, dir string) (all []byte, ring *keyring.Ring) {
	engine, err := mvcc.Open(vfs.Default, dir, mvcc.Options{})
	require.NoError(t, err)
	defer engine.Close()
	s := store.New(store.Options{Engine: engine})
	require.NoError(t, s.Local(func(v *store.View) (err error) { ring, err = keyring.Load(v); return err }))
	snap := engine.Snapshot()
	defer snap.Close()
	for revision := max(snap.CompactRevision(), 1); revision <= snap.Revision(); revision++ {
		kvs, err := snap.Range(mvcc.RangeOptions{Key: []byte{0}, End: []byte{0}, Revision: revision})
		require.NoError(t, err)
		for _, kv := range kvs.KVs {
			if kv.ModRevision == revision {
				all = append(append(all, kv.Key...), kv.Value...)
			}
		}
	}
	return all, ring
}

// TestNoSecretInFiles creates each kind of secret in a cloud: passwords, tokens, keys. It checks that none of them is
// in a file of a member or agent, a record, a backup, a log, a metric or a command line, and that only the owner can
// read these files.
func TestNoSecretInFiles(t *testing.T) {
	w := newWorld(t)
	w.startAgent()
	ctx := w.context(3 * time.Minute)
	hidden := secrets{}
	home := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(home, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	admin := file("admin", w.adminToken)
	hidden["the administrator's token"] = []byte(w.adminToken)

	for _, user := range []string{"ada-visible", "bob-visible"} {
		password := random()
		hidden["password of "+user] = []byte(password)
		require.NoError(t, w.admin.EnsureUser(ctx, user, password, &identityv1.Binding{Role: "project:admin", OrgId: "default", ProjectId: "default"}))
		token, err := w.rest(2, "").IssueToken(ctx, user, password, nil)
		require.NoError(t, err)
		hidden["token of "+user] = []byte(token[strings.LastIndex(token, ".")+1:])
		_, errs, code := w.trivet(ctx, home, "login", "--user", user, "--password-file", file("password", password), "--endpoint", "127.0.0.1")
		require.Zero(t, code, errs)
		wrong := random()
		hidden["a wrong password of "+user] = []byte(wrong)
		_, _, code = w.trivet(ctx, home, "login", "--user", user, "--password-file", file("password", wrong), "--endpoint", "127.0.0.1")
		require.NotZero(t, code)
	}
	account, err := w.admin.Identity.CreateServiceAccount(ctx, &identityv1.CreateServiceAccountRequest{
		OrgId: "default", ProjectId: "default", Name: "robot", Roles: []string{"project:viewer"},
	})
	require.NoError(t, err)
	require.NotEmpty(t, account.GetSecret())
	hidden["secret of a service account"] = []byte(account.GetSecret())
	node, err := w.admin.NodeToken(ctx)
	require.NoError(t, err)
	hidden["a host's token"] = []byte(strings.Split(node, ".")[1])
	used, err := os.ReadFile(w.dir.Path(w.agent.Name + ".join"))
	require.NoError(t, err)
	hidden["the token that the host joined with"] = []byte(strings.Split(string(used), ".")[1])
	member, err := w.admin.Operator.CreateMemberToken(ctx, &operatorv1.CreateMemberTokenRequest{})
	require.NoError(t, err)
	hidden["a member's token"] = []byte(strings.Split(member.GetToken(), ".")[1])
	_, err = w.admin.Identity.RotateKeys(ctx, &identityv1.RotateKeysRequest{Force: true})
	require.NoError(t, err)
	_, errs, code := w.trivet(ctx, home, "--token-file", admin, "node", "list")
	require.Zero(t, code, errs)

	backup := filepath.Join(home, "backup")
	_, errs, code = w.trivet(ctx, home, "--token-file", admin, "cluster", "backup", backup)
	require.Zero(t, code, errs)

	metrics := w.metrics()
	require.Contains(t, string(metrics), "trivet_", "the metrics must be readable")
	lines := w.commandLines()
	require.Contains(t, string(lines), "--data-dir", "the command lines must be readable")
	require.NoError(t, w.dir.Stop(w.agent.Name, 12*time.Second))
	require.NoError(t, w.trio.StopAll())

	key, err := clusterkey.Load(w.trio.KeyFile())
	require.NoError(t, err)
	hidden.addKey("the key that secrets are sealed with", key.Derive("secrets"))
	// Read the records from a restored backup: a member may have its newest records only in its raft log.
	w.renewKey("new.key")
	out, err := w.controlplane("restore", "--from", backup, "--cluster-key", "new.key", "--data-dir", "restored", "--listen", "127.0.0.1")
	require.NoError(t, err, out)
	all, ring := records(t, w.dir.Path("restored", "system"))
	require.NotNil(t, ring)
	require.GreaterOrEqual(t, len(ring.Keys), 3)
	for _, k := range ring.Keys {
		private, err := k.Private(key)
		require.NoError(t, err)
		hidden.addKey("signing key "+k.ID, private.Seed())
		require.True(t, bytes.Contains(all, k.Sealed), "the search must find data that is not secret")
	}
	require.Contains(t, string(all), "ada-visible")
	require.Empty(t, hidden.found(all), "the records contain a secret")
	sealed, err := os.ReadFile(backup)
	require.NoError(t, err)
	require.Empty(t, hidden.found(sealed), "the backup contains a secret")
	require.False(t, bytes.Contains(sealed, []byte("ada-visible")), "the backup must be encrypted")
	for id := range w.trio.Members {
		w.scan(w.trio.DataDir(id), hidden)
	}
	w.scanAgent(hidden)
	require.Empty(t, hidden.found(lines), "the command lines contain a secret")
	require.Empty(t, hidden.found(metrics), "the metrics contain a secret")
	logs, err := filepath.Glob(w.dir.Path("log", "*"))
	require.NoError(t, err)
	require.Len(t, logs, 4)
	for _, path := range logs {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NotEmpty(t, text)
		require.Empty(t, hidden.found(text), "%s contains a secret", path)
	}
}

// scan checks that no file in a member's data directory contains a secret, except for admin.token, and that only the
// member's user can read the files. It also checks that a text that is not secret is found, so that the scan works.
func (w *world) scan(dir string, hidden secrets) {
	visible := 0
	require.NoError(w.t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if d.IsDir() {
			require.Equal(w.t, fs.FileMode(0o700), info.Mode().Perm(), path)
			return nil
		}
		require.Equal(w.t, fs.FileMode(0o600), info.Mode().Perm(), path)
		text, err := os.ReadFile(path)
		if err != nil || d.Name() == "admin.token" {
			return err
		}
		require.Empty(w.t, hidden.found(text), "%s contains a secret", path)
		visible += bytes.Count(text, []byte("ada-visible"))
		return nil
	}))
	require.NotZero(w.t, visible, "the search must find data that is not secret")
}

// scanAgent checks that no file in the agent's data directory contains a secret, and that only root can read the files.
func (w *world) scanAgent(hidden secrets) {
	files := 0
	require.NoError(w.t, filepath.WalkDir(w.agent.DataDir(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		require.Zero(w.t, info.Mode().Perm()&0o077, path)
		text, err := os.ReadFile(path)
		require.Empty(w.t, hidden.found(text), "%s contains a secret", path)
		files++
		return err
	}))
	require.NotZero(w.t, files)
}

// TestScanFindsSecrets checks that secrets.found finds a password, and a key in each of its encodings.
func TestScanFindsSecrets(t *testing.T) {
	hidden := secrets{"password": []byte("correct horse")}
	hidden.addKey("key", []byte{1, 2, 3, 250, 251, 252})
	require.Equal(t, []string{"password"}, hidden.found([]byte("a correct horse b")))
	require.Equal(t, []string{"key"}, hidden.found([]byte{0, 1, 2, 3, 250, 251, 252}))
	require.Equal(t, []string{"key in hex"}, hidden.found([]byte("010203fafbfc")))
	require.Equal(t, []string{"key in base64", "key in base64 of URLs"}, hidden.found([]byte("AQID+vv8 AQID-vv8")))
}

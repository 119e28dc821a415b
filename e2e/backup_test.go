package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// controlplane runs trivet-controlplane with arguments, such as restore, in the cloud's directory until it ends. It
// returns its output.
func (w *world) controlplane(args ...string) (out string, err error) {
	cmd := exec.CommandContext(w.t.Context(), w.trio.Bin.ControlPlane, args...)
	cmd.Dir = string(w.dir)
	var text strings.Builder
	cmd.Stdout, cmd.Stderr = &text, &text
	err = cmd.Run()
	return text.String(), err
}

// renewKey writes a key for a new cluster, which replaces the cluster of the present key, to a file in the cloud's
// directory.
func (w *world) renewKey(name string) {
	out, err := w.controlplane("keygen", "--renew", w.trio.KeyFile())
	require.NoError(w.t, err, out)
	require.NoError(w.t, os.WriteFile(w.dir.Path(name), []byte(out), 0o600))
	require.NoError(w.t, os.Chown(w.dir.Path(name), lab.UID, lab.UID))
}

// own changes the owner of a directory and of all files in it to the user that members run as.
func (w *world) own(dir string) {
	require.NoError(w.t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Chown(path, lab.UID, lab.UID)
	}))
}

// startWith starts a member as the process name, with the address host, the data directory dir and additional flags. It
// then waits until the member is ready.
func (w *world) startWith(name, host, dir string, flags ...string) {
	require.NoError(w.t, w.dir.Start(lab.Program{
		Name: name, Binary: "./bin/" + filepath.Base(w.trio.Bin.ControlPlane), Work: string(w.dir), UID: lab.UID,
		Args: append([]string{"--listen", host, "--data-dir", dir, "--import-dir", "import"}, flags...),
	}))
	w.t.Cleanup(func() {
		if w.dir.Running(name) != 0 {
			require.NoError(w.t, w.dir.Stop(name, 12*time.Second))
		}
	})
	require.NoError(w.t, lab.Until(w.context(30*time.Second), name+" is ready", func(ctx context.Context) error {
		a, err := (&lab.REST{Host: host}).Do(ctx, 8084, http.MethodGet, "/ready", nil)
		if err == nil && a.Status != http.StatusOK {
			err = errors.New(a.Raw)
		}
		return err
	}))
}

// token waits until the member at host accepts the administrator's token that is in a data directory, and returns a
// client with this token.
func (w *world) token(host, dir string) *lab.GRPC {
	var g *lab.GRPC
	require.NoError(w.t, lab.Until(w.context(90*time.Second), "the member accepts the administrator's token", func(ctx context.Context) error {
		text, err := os.ReadFile(w.dir.Path(dir, "admin.token"))
		if err != nil {
			return err
		}
		if g, err = lab.Dial(host, strings.TrimSpace(string(text))); err != nil {
			return err
		}
		_, err = g.Operator.ClusterStatus(ctx, nil)
		return err
	}))
	w.t.Cleanup(func() { g.Close() })
	return g
}

func (w *world) put(host, key string) {
	require.NoError(w.t, lab.Until(w.context(20*time.Second), key+" is written", func(ctx context.Context) error {
		a, err := (&lab.REST{Host: host}).Do(ctx, 8081, http.MethodPut, "/api/v1/kv/"+key, map[string]string{"value": "v-" + key})
		if err == nil && a.Status != http.StatusOK {
			err = errors.New(a.Raw)
		}
		return err
	}))
}

func (w *world) has(host, key string) bool {
	a, err := (&lab.REST{Host: host}).Do(w.context(20*time.Second), 8081, http.MethodGet, "/api/v1/kv/"+key, nil)
	require.NoError(w.t, err)
	return a.Status == http.StatusOK && strings.Contains(a.Raw, "v-"+key)
}

// TestBackupAndRestore restores a stopped cloud from a backup. It checks that records and keys are as of the time of
// the backup, that the result is a new cluster, and that members can be added to it. It also checks that restore fails
// for damaged backups and wrong cluster keys, and then leaves no files.
func TestBackupAndRestore(t *testing.T) {
	w := newWorld(t)
	ctx := w.context(3 * time.Minute)
	_, err := w.admin.Identity.CreateUser(ctx, &identityv1.CreateUserRequest{Id: "ada"})
	require.NoError(t, err)
	for i := range 30 {
		w.put("127.0.0.1", fmt.Sprint("before-", i))
	}
	home := t.TempDir()
	token := filepath.Join(home, "token")
	require.NoError(t, os.WriteFile(token, []byte(w.adminToken), 0o600))
	file := filepath.Join(home, "cloud.backup")
	_, errs, code := w.trivet(ctx, home, "--endpoint", "127.0.0.2", "--token-file", token, "cluster", "backup", file)
	require.Zero(t, code, errs)
	_, errs, code = w.trivet(ctx, home, "--token-file", token, "cluster", "backup", file)
	require.Equal(t, 4, code)
	require.Contains(t, errs, "exists already")
	info, err := os.Stat(file)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	w.put("127.0.0.1", "after")
	was, err := w.admin.Operator.ClusterStatus(ctx, &operatorv1.ClusterStatusRequest{})
	require.NoError(t, err)
	require.NoError(t, w.trio.StopAll())

	w.renewKey("new.key")
	refused := func(want string, args ...string) {
		t.Helper()
		out, err := w.controlplane(append([]string{"restore", "--data-dir", "restored"}, args...)...)
		require.Error(t, err)
		require.Contains(t, out, want)
		left, _ := os.ReadDir(w.dir.Path("restored"))
		require.Empty(t, left, "a failed restore must leave no files")
	}
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	broken := filepath.Join(home, "broken")
	require.NoError(t, os.WriteFile(broken, text[:len(text)-100], 0o600))
	refused("is cut short", "--from", broken, "--cluster-key", "new.key")
	text[len(text)/2] ^= 1
	require.NoError(t, os.WriteFile(broken, text, 0o600))
	refused("is damaged, or was changed", "--from", broken, "--cluster-key", "new.key")
	out, err := w.controlplane("keygen")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(w.dir.Path("other.key"), []byte(out), 0o600))
	refused("made with another cluster key", "--from", file, "--cluster-key", "other.key")
	refused("keygen --renew", "--from", file, "--cluster-key", "cluster.key")

	out, err = w.controlplane("restore", "--from", file, "--cluster-key", "new.key", "--data-dir", "restored", "--node-id", "5", "--listen", "127.0.0.5")
	require.NoError(t, err, out)
	out, err = w.controlplane("restore", "--from", file, "--cluster-key", "new.key", "--data-dir", "restored")
	require.Error(t, err)
	require.Contains(t, out, "is not empty")
	w.own(w.dir.Path("restored"))
	w.startWith("restored", "127.0.0.5", "restored", "--node-id", "5")
	g := w.token("127.0.0.5", "restored")
	for i := range 30 {
		require.True(t, w.has("127.0.0.5", fmt.Sprint("before-", i)))
	}
	require.False(t, w.has("127.0.0.5", "after"))
	list, err := g.Identity.ListUsers(ctx, &identityv1.ListUsersRequest{})
	require.NoError(t, err)
	require.Len(t, list.GetUsers(), 2, "the restored users must be admin and ada")
	now, err := g.Operator.ClusterStatus(ctx, &operatorv1.ClusterStatusRequest{})
	require.NoError(t, err)
	require.NotEqual(t, was.GetCluster(), now.GetCluster())
	require.Len(t, now.GetMembers(), 1)
	old, err := lab.Dial("127.0.0.5", w.adminToken)
	require.NoError(t, err)
	defer old.Close()
	_, err = old.Operator.ClusterStatus(ctx, &operatorv1.ClusterStatusRequest{})
	require.ErrorContains(t, err, "Unauthenticated", "the restored cluster must refuse tokens of the old one")
	w.put("127.0.0.5", "again")

	// A new member can join the restored cluster.
	_, err = g.Operator.AddMember(ctx, &operatorv1.AddMemberRequest{Id: 6, RaftAddr: "127.0.0.6"})
	require.NoError(t, err)
	require.NoError(t, os.Mkdir(w.dir.Path("sixth"), 0o700))
	w.own(w.dir.Path("sixth"))
	w.startWith("sixth", "127.0.0.6", "sixth", "--node-id", "6", "--join", "127.0.0.5", "--cluster-key", "new.key")
	require.NoError(t, lab.Until(ctx, "the sixth member is a voter", func(ctx context.Context) error {
		s, err := g.Operator.ClusterStatus(ctx, nil)
		if err == nil && len(s.GetGroups()[1].GetVoters()) != 2 {
			err = errors.New("not yet")
		}
		return err
	}))
	require.True(t, w.has("127.0.0.6", "before-1"))
	require.True(t, w.has("127.0.0.6", "again"))
}

// TestForceNewCluster kills all three members and restarts the third with --force-new-cluster. It checks that this
// member alone forms a new cluster with its data, and that the other two cannot join that cluster.
func TestForceNewCluster(t *testing.T) {
	w := newWorld(t)
	ctx := w.context(3 * time.Minute)
	for i := range 20 {
		w.put("127.0.0.1", fmt.Sprint("key-", i))
	}
	for id := range w.trio.Members {
		require.NoError(t, w.dir.Kill(w.trio.Name(id)))
	}
	flags := []string{"--node-id", "3", "--listen", "127.0.0.3", "--data-dir", w.trio.Name(3), "--force-new-cluster"}
	out, err := w.controlplane(append(flags, "--cluster-key", "cluster.key")...)
	require.Error(t, err)
	require.Contains(t, out, "keygen --renew")
	w.renewKey("new.key")
	w.startWith("survivor", "127.0.0.3", w.trio.Name(3), "--node-id", "3", "--cluster-key", "new.key", "--force-new-cluster")
	g := w.token("127.0.0.3", w.trio.Name(3))
	found := 0
	for i := range 20 {
		if w.has("127.0.0.3", fmt.Sprint("key-", i)) {
			found++
		}
	}
	// The member may lack the last writes, because the other two are a majority without it.
	require.GreaterOrEqual(t, found, 10)
	w.put("127.0.0.3", "alone")
	s, err := g.Operator.ClusterStatus(ctx, &operatorv1.ClusterStatusRequest{})
	require.NoError(t, err)
	require.Len(t, s.GetMembers(), 1)

	// The member must not start with the flag a second time, nor with the old key.
	require.NoError(t, w.dir.Stop("survivor", 12*time.Second))
	out, err = w.controlplane(append(flags, "--cluster-key", "new.key")...)
	require.Error(t, err)
	require.Contains(t, out, "without --force-new-cluster")
	out, err = w.controlplane("--node-id", "3", "--listen", "127.0.0.3", "--data-dir", w.trio.Name(3), "--cluster-key", "cluster.key")
	require.Error(t, err)
	require.Contains(t, out, "use the key of the data's cluster")
	w.own(w.dir.Path(w.trio.Name(3)))
	w.startWith("survivor", "127.0.0.3", w.trio.Name(3), "--node-id", "3", "--cluster-key", "new.key")
	require.True(t, w.has("127.0.0.3", "alone"))

	// The other two start again. They are a majority of the old cluster, and not members of the new one.
	require.NoError(t, w.trio.Start(1))
	require.NoError(t, w.trio.Start(2))
	w.ready()
	w.put("127.0.0.1", "elsewhere")
	require.False(t, w.has("127.0.0.3", "elsewhere"))
	s, err = w.token("127.0.0.3", w.trio.Name(3)).Operator.ClusterStatus(ctx, &operatorv1.ClusterStatusRequest{})
	require.NoError(t, err)
	require.Len(t, s.GetMembers(), 1)
}

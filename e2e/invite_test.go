package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

// newcomer starts a program as a member that joins through members 1 and 2, with its own directory and additional
// flags.
func (w *world) newcomer(name, host string, more ...string) {
	require.NoError(w.t, os.MkdirAll(w.dir.Path(name), 0o700))
	w.own(w.dir.Path(name))
	require.NoError(w.t, w.dir.Start(lab.Program{
		Name: name, Binary: "./bin/" + filepath.Base(w.trio.Bin.ControlPlane), Work: string(w.dir), UID: lab.UID,
		Args: append([]string{"--listen", host, "--data-dir", name, "--join", "127.0.0.1,127.0.0.2", "--import-dir", "import"}, more...),
	}))
	w.t.Cleanup(func() {
		if w.dir.Running(name) != 0 {
			require.NoError(w.t, w.dir.Stop(name, 12*time.Second))
		}
	})
}

// endsSaying waits until a program has ended, and checks that its log contains the words.
func (w *world) endsSaying(ctx context.Context, name string, words ...string) {
	w.t.Helper()
	require.NoError(w.t, lab.Until(ctx, name+" ends", func(context.Context) error {
		if w.dir.Running(name) != 0 {
			return errors.New("the program runs")
		}
		return nil
	}))
	log, err := os.ReadFile(w.dir.LogFile(name))
	require.NoError(w.t, err)
	for _, word := range words {
		require.Contains(w.t, string(log), word)
	}
}

// TestMemberToken checks that a fourth member can join with a member token and no cluster key, that the token can be
// used only once, and that later starts of the member need no token.
func TestMemberToken(t *testing.T) {
	w := newWorld(t)
	ctx := w.context(3 * time.Minute)
	home := t.TempDir()
	admin := filepath.Join(home, "token")
	require.NoError(t, os.WriteFile(admin, []byte(w.adminToken), 0o600))
	token, errs, code := w.trivet(ctx, home, "--token-file", admin, "cluster", "token")
	require.Zero(t, code, errs)
	file := func(name, text string) {
		require.NoError(t, os.WriteFile(w.dir.Path(name), []byte(text), 0o600))
		require.NoError(t, os.Chown(w.dir.Path(name), lab.UID, lab.UID))
	}
	file("member.token", token)

	// A member must not join with a host's token, with the token of another cluster (which it must not send to any
	// member), or without a token.
	nodeToken, err := w.admin.NodeToken(ctx)
	require.NoError(t, err)
	file("node.token", nodeToken)
	w.newcomer("host", "127.0.0.5", "--join-token", "node.token")
	w.endsSaying(ctx, "host", "trivet cluster token")
	file("foreign.token", token[:len(token)-1-64]+fmt.Sprintf("%064d", 7))
	w.newcomer("foreigner", "127.0.0.5", "--join-token", "foreign.token")
	w.endsSaying(ctx, "foreigner", "another certificate authority")
	w.newcomer("nobody", "127.0.0.5")
	w.endsSaying(ctx, "nobody", "trivet cluster token")

	name := w.trio.Name(4)
	w.newcomer(name, "127.0.0.4", "--join-token", "member.token")
	_, err = w.admin.Operator.AddMember(ctx, &operatorv1.AddMemberRequest{Id: 4, RaftAddr: "127.0.0.4"}) // the member waits for this
	require.NoError(t, err)
	w.trio.Members[4] = "127.0.0.4"
	w.voters(4, 1, 2, 3, 4)
	kept, err := clusterkey.Load(w.dir.Path(name, "cluster.key")) // fails if other users can read the file
	require.NoError(t, err)
	shared, err := clusterkey.Load(w.trio.KeyFile())
	require.NoError(t, err)
	require.Equal(t, shared.Encode(), kept.Encode())
	require.NoFileExists(t, w.dir.Path(name, "join.key"))

	w.newcomer("second", "127.0.0.5", "--join-token", "member.token")
	w.endsSaying(ctx, "second", "used by another")
	require.NoFileExists(t, w.dir.Path("second", "cluster.key"))

	require.NoError(t, w.dir.Stop(name, 12*time.Second))
	require.NoError(t, os.Remove(w.dir.Path("member.token")))
	w.newcomer(name, "127.0.0.4")
	w.ready()
	w.voters(4, 1, 2, 3, 4)

	used, err := w.admin.Identity.ListAuditRecords(ctx, &identityv1.ListAuditRecordsRequest{Method: "BringKey"})
	require.NoError(t, err)
	require.Len(t, used.GetRecords(), 1)
	require.Equal(t, "member-token/"+token[:16], used.GetRecords()[0].GetPrincipal())
	require.Equal(t, "OK", used.GetRecords()[0].GetOutcome())
}

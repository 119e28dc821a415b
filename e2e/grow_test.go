package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// newLone starts a cloud with one member. The test can add members 2 and 3 with join.
func newLone(t *testing.T) *world {
	t.Helper()
	dir := lab.Dir(t.TempDir())
	require.NoError(t, os.Chmod(string(dir), 0o755))
	w := &world{t: t, dir: dir, trio: lab.NewTrio(dir, binaries(t))}
	require.NoError(t, w.trio.Prepare())
	w.trio.Members = map[int]string{1: "127.0.0.1"}
	t.Cleanup(func() {
		if t.Failed() {
			w.showLogs()
		}
		for id := range 3 {
			if name := w.trio.Name(id + 1); w.dir.Running(name) != 0 {
				require.NoError(t, w.dir.Stop(name, 12*time.Second))
			}
		}
	})
	require.NoError(t, w.trio.StartAll())
	w.ready()
	require.NoError(t, lab.Until(w.context(30*time.Second), "the administrator's token exists", func(context.Context) (err error) {
		w.adminToken, err = w.trio.AdminToken()
		return err
	}))
	w.admin = w.dial(1, w.adminToken)
	return w
}

// join starts a member that joins the cluster through member 1. Without withID, it does not get its ID as a flag.
func (w *world) join(id int, withID bool) {
	args := []string{
		"--listen", fmt.Sprintf("127.0.0.%d", id), "--data-dir", w.trio.Name(id), "--cluster-key", "cluster.key",
		"--join", "127.0.0.1", "--import-dir", "import",
	}
	if withID {
		args = append(args, "--node-id", fmt.Sprint(id))
	}
	require.NoError(w.t, w.dir.Start(lab.Program{
		Name: w.trio.Name(id), Binary: "./bin/" + filepath.Base(w.trio.Bin.ControlPlane), Args: args, Work: string(w.dir), UID: lab.UID,
	}))
}

// voters waits until the member with the id via reports three things: exactly the voters in the parameter want, no
// learner, and a leader in both raft groups.
func (w *world) voters(via int, want ...uint64) {
	w.t.Helper()
	g := w.dial(via, w.adminToken)
	require.NoError(w.t, lab.Until(w.context(time.Minute), fmt.Sprint("voters are ", want), func(ctx context.Context) error {
		s, err := g.Operator.ClusterStatus(ctx, nil)
		if err != nil {
			return err
		}
		for _, group := range s.GetGroups() {
			got := slices.Sorted(slices.Values(group.GetVoters()))
			if !slices.Equal(got, want) || len(group.GetLearners()) > 0 || group.GetLeaderId() == 0 {
				return fmt.Errorf("group %s: voters %d, learners %d, leader %d", group.GetName(), got, group.GetLearners(), group.GetLeaderId())
			}
		}
		return nil
	}))
}

// load writes keys from four goroutines, through the members in the field hosts, until the function end is called.
// acked holds the acknowledged keys.
type load struct {
	mu    sync.Mutex
	hosts []string
	acked []string
	stop  context.CancelFunc
	work  sync.WaitGroup
}

func (w *world) startLoad(hosts ...string) *load {
	ctx, cancel := context.WithCancel(w.t.Context())
	l := &load{hosts: hosts, stop: cancel}
	for i := range 4 {
		l.work.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				key := fmt.Sprintf("load-%d-%d", i, n)
				limited, cancel := context.WithTimeout(ctx, 3*time.Second)
				a, err := (&lab.REST{Host: l.host()}).Do(limited, 8081, http.MethodPut, "/api/v1/kv/"+key, map[string]string{"value": key})
				cancel()
				if err == nil && a.Status == http.StatusOK {
					l.mu.Lock()
					l.acked = append(l.acked, key)
					l.mu.Unlock()
				}
			}
		})
	}
	w.t.Cleanup(l.end)
	return l
}

func (l *load) host() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.hosts[rand.IntN(len(l.hosts))]
}

func (l *load) through(hosts ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hosts = hosts
}

func (l *load) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.acked)
}

// more waits until n further keys of the load are acknowledged. This shows that the cluster accepts writes.
func (w *world) more(l *load, n int) {
	w.t.Helper()
	want := l.count() + n
	require.NoError(w.t, lab.Until(w.context(time.Minute), fmt.Sprint(n, " more keys are written"), func(context.Context) error {
		if got := l.count(); got < want {
			return fmt.Errorf("%d are missing", want-got)
		}
		return nil
	}))
}

func (l *load) end() {
	l.stop()
	l.work.Wait()
}

// TestGrowAndShrink adds two members to a cloud of one and then removes all but the third, under load. It checks that
// the cloud accepts writes throughout and that no acknowledged key is lost, although the first member is killed and
// local processes add three members that do not exist.
func TestGrowAndShrink(t *testing.T) {
	w := newLone(t)
	ctx := w.context(4 * time.Minute)
	l := w.startLoad("127.0.0.1")
	w.more(l, 200)

	w.join(2, true) // start member 2 before it is added to the cluster
	_, err := w.admin.Operator.AddMember(ctx, &operatorv1.AddMemberRequest{Id: 2, RaftAddr: "127.0.0.2"})
	require.NoError(t, err)
	w.trio.Members[2] = "127.0.0.2"
	w.voters(1, 1, 2)
	w.more(l, 50)

	// Any process of the host may add an entry for a member over REST. The member joins only when a process with the
	// cluster key starts as that member.
	a, err := w.rest(1, "").Do(ctx, 8081, http.MethodPost, "/api/v1/cluster/members", map[string]any{"node_id": 3, "raft_addr": "127.0.0.3:2380"})
	require.NoError(t, err)
	require.Equal(t, http.StatusCreated, a.Status, a.Raw)
	w.join(3, false) // start member 3 after it was added, without its ID
	w.trio.Members[3] = "127.0.0.3"
	w.voters(2, 1, 2, 3)
	l.through("127.0.0.1", "127.0.0.2", "127.0.0.3")
	w.more(l, 50)

	for id := 7; id <= 9; id++ {
		a, err := w.rest(2, "").Do(ctx, 8081, http.MethodPost, "/api/v1/cluster/members", map[string]any{"node_id": id, "raft_addr": fmt.Sprintf("127.0.0.%d:2380", id)})
		require.NoError(t, err)
		require.Equal(t, http.StatusCreated, a.Status, a.Raw)
	}
	w.voters(3, 1, 2, 3)

	// The entries of members that do not exist must not count: two of three members must be a quorum.
	require.NoError(t, w.dir.Kill(w.trio.Name(1)))
	l.through("127.0.0.2", "127.0.0.3")
	w.more(l, 100)
	for _, id := range []uint64{7, 8, 9} {
		_, err := w.dial(2, w.adminToken).Operator.RemoveMember(ctx, &operatorv1.RemoveMemberRequest{Id: id})
		require.NoError(t, err)
	}
	// While member 1 is down, no other voter may be removed.
	_, err = w.dial(2, w.adminToken).Operator.RemoveMember(ctx, &operatorv1.RemoveMemberRequest{Id: 3, Force: true})
	require.ErrorContains(t, err, "less than a quorum")

	w.trio.Members = map[int]string{1: "127.0.0.1"} // start member 1 with the flags of its first start
	require.NoError(t, w.trio.Start(1))
	w.ready()
	w.trio.Members = map[int]string{1: "127.0.0.1", 2: "127.0.0.2", 3: "127.0.0.3"}
	w.voters(1, 1, 2, 3)

	// Remove members 1 and 2.
	ended := func(id int) {
		t.Helper()
		require.NoError(t, lab.Until(w.context(30*time.Second), fmt.Sprint("member ", id, " has ended"), func(context.Context) error {
			if w.dir.Running(w.trio.Name(id)) != 0 {
				return errors.New("the member runs")
			}
			return nil
		}))
		text, err := os.ReadFile(w.dir.LogFile(w.trio.Name(id)))
		require.NoError(t, err)
		require.Contains(t, string(text), fmt.Sprintf("member %d was removed from the cluster", id))
	}
	g := w.dial(3, w.adminToken)
	l.through("127.0.0.3")
	_, err = g.Operator.RemoveMember(ctx, &operatorv1.RemoveMemberRequest{Id: 1})
	require.NoError(t, err)
	ended(1)
	w.more(l, 50)
	_, err = g.Operator.RemoveMember(ctx, &operatorv1.RemoveMemberRequest{Id: 2})
	require.ErrorContains(t, err, "one voter would be left")
	_, err = g.Operator.RemoveMember(ctx, &operatorv1.RemoveMemberRequest{Id: 2, Force: true})
	require.NoError(t, err)
	ended(2)
	w.voters(3, 3)
	w.more(l, 50)
	l.end()

	// Restart the last member. It must have all acknowledged keys.
	require.NoError(t, w.dir.Stop(w.trio.Name(3), 12*time.Second))
	w.join(3, false)
	w.trio.Members = map[int]string{3: "127.0.0.3"}
	w.ready()
	for _, key := range l.acked {
		a, err := w.rest(3, "").Do(ctx, 8081, http.MethodGet, "/api/v1/kv/"+key, nil)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, a.Status, "%s was acknowledged: %s", key, a.Raw)
	}
	t.Logf("%d keys acknowledged", len(l.acked))
}

// TestReplaceMember deletes a member's data. It checks that the member does not run until an operator has replaced it
// with `trivet cluster replace`, and that it then starts with its old flags and is a voter again.
func TestReplaceMember(t *testing.T) {
	w := newWorld(t)
	ctx := w.context(3 * time.Minute)
	w.voters(1, 1, 2, 3)
	require.NoError(t, w.dir.Kill(w.trio.Name(2)))
	require.NoError(t, os.RemoveAll(w.trio.DataDir(2)))
	require.NoError(t, w.trio.Prepare())
	require.NoError(t, w.trio.Start(2))
	require.NoError(t, lab.Until(ctx, "the empty member ends", func(context.Context) error {
		if w.dir.Running(w.trio.Name(2)) != 0 {
			return errors.New("the member runs")
		}
		return nil
	}))
	home := t.TempDir()
	token := filepath.Join(home, "token")
	require.NoError(t, os.WriteFile(token, []byte(w.adminToken), 0o600))
	out, errs, code := w.trivet(ctx, home, "--token-file", token, "cluster", "replace", "2")
	require.Zero(t, code, out+errs)
	w.voters(1, 1, 3)
	require.NoError(t, os.RemoveAll(w.trio.DataDir(2)))
	require.NoError(t, w.trio.Prepare())
	require.NoError(t, w.trio.Start(2))
	w.voters(2, 1, 2, 3)
	// Kill the leader. The new member must count for the quorum that elects another one.
	leader := w.leader(2)
	w.dir.Signal(w.trio.Name(leader), syscall.SIGKILL)
	require.NotEqual(t, leader, func() int {
		for {
			if now := w.leader(2); now != leader || ctx.Err() != nil {
				return now
			}
		}
	}())
}

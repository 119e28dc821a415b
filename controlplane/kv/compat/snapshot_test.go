package compat

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/kv/snapfile"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
)

// TestEtcdRestoresTrivetSnapshot restores a snapshot of Trivet's engine with etcdutl, and checks that an etcd started
// from it serves the same keys, leases, users and roles.
func TestEtcdRestoresTrivetSnapshot(t *testing.T) {
	tools := etcdPrograms(t)
	k := newTrivetEngine(t)
	k.run(step(command.StepGrant, func(s *command.Step) { s.Lease, s.TTL = 7, 600 }), putStep("leased", "x", 7))
	k.run(putStep("a", "1", 0), putStep("b", "1", 0), putStep("c", "1", 0))
	for i := range 300 {
		k.run(putStep(fmt.Sprintf("many/%d", i%100), fmt.Sprint(i), 0))
	}
	k.run(putStep("big", string(make([]byte, 1<<20)), 0))
	k.enableAuth()
	k.run(step(command.StepDelete, func(s *command.Step) { s.Key = []byte("b") }))
	snap := k.e.Snapshot()
	defer snap.Close()
	want, err := snap.Range(mvcc.RangeOptions{Key: []byte{0}, End: []byte{0}})
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "snapshot")
	k.save(snap, file)

	var status struct {
		Revision, TotalKey int64
		Version            string
	}
	require.NoError(t, json.Unmarshal(tools.run("etcdutl", "snapshot", "status", file, "-w", "json"), &status))
	require.Equal(t, snap.Revision(), status.Revision)
	require.EqualValues(t, len(want.KVs), status.TotalKey)
	require.Equal(t, snapfile.StorageVersion, status.Version)

	e := tools.restore(file)
	root := e.client("root", "toor")
	ctx := t.Context()
	got, err := root.Get(ctx, "\x00", clientv3.WithFromKey())
	require.NoError(t, err)
	require.Equal(t, snap.Revision(), got.Header.Revision)
	require.Equal(t, want.KVs, fromEtcd(got.Kvs))

	lease, err := root.TimeToLive(ctx, 7, clientv3.WithAttachedKeys())
	require.NoError(t, err)
	require.EqualValues(t, 600, lease.GrantedTTL)
	require.Equal(t, [][]byte{[]byte("leased")}, lease.Keys)

	_, err = root.Get(ctx, "a", clientv3.WithRev(snap.Revision()-1))
	require.ErrorIs(t, err, rpctypes.ErrCompacted)
	_, err = root.Get(ctx, "a", clientv3.WithRev(snap.Revision()))
	require.NoError(t, err)

	// Users have the granted permissions and no others.
	ann := e.client("ann", "secret")
	_, err = ann.Get(ctx, "many/", clientv3.WithPrefix())
	require.NoError(t, err)
	_, err = ann.Get(ctx, "a")
	require.ErrorIs(t, err, rpctypes.ErrPermissionDenied)
	auth, err := root.AuthStatus(ctx)
	require.NoError(t, err)
	require.Equal(t, k.users().Revision(), auth.AuthRevision)
	list, err := root.UserList(ctx)
	require.NoError(t, err)
	require.Equal(t, []string{"ann", "bot", "root"}, list.Users)

	// New writes continue at the next revision.
	events := root.Watch(ctx, "\x00", clientv3.WithFromKey(), clientv3.WithRev(snap.Revision()+1))
	put, err := root.Put(ctx, "a", "2", clientv3.WithPrevKV())
	require.NoError(t, err)
	require.Equal(t, snap.Revision()+1, put.Header.Revision)
	require.Equal(t, "1", string(put.PrevKv.Value))
	seen := <-events
	require.NoError(t, seen.Err())
	require.Equal(t, "a", string(seen.Events[0].Kv.Key))
	_, err = root.Put(ctx, "b", "again")
	require.NoError(t, err)
	_, err = root.Compact(ctx, put.Header.Revision+1, clientv3.WithCompactPhysical())
	require.NoError(t, err)

	// All of this must also hold after a restart, when etcd reads its data from disk.
	e.stop()
	e.start()
	root = e.client("root", "toor")
	again, err := root.Get(ctx, "\x00", clientv3.WithFromKey(), clientv3.WithCountOnly())
	require.NoError(t, err)
	require.Equal(t, got.Count+1, again.Count)
	require.Equal(t, snap.Revision()+2, again.Header.Revision)
}

func TestEtcdRestoresEmptyTrivetSnapshot(t *testing.T) {
	tools := etcdPrograms(t)
	k := newTrivetEngine(t)
	snap := k.e.Snapshot()
	defer snap.Close()
	file := filepath.Join(t.TempDir(), "snapshot")
	k.save(snap, file)
	tools.run("etcdutl", "snapshot", "status", file)
	got, err := tools.restore(file).client("", "").Get(t.Context(), "\x00", clientv3.WithFromKey())
	require.NoError(t, err)
	require.EqualValues(t, 1, got.Header.Revision)
	require.Empty(t, got.Kvs)
}

// TestEtcdRestoresTrivetSnapshotWithRevisionBump checks that etcdutl --bump-revision adds to the last revision,
// although no live key has that revision.
func TestEtcdRestoresTrivetSnapshotWithRevisionBump(t *testing.T) {
	tools := etcdPrograms(t)
	k := newTrivetEngine(t)
	k.run(putStep("a", "1", 0))
	k.run(putStep("b", "1", 0))
	k.run(step(command.StepDelete, func(s *command.Step) { s.Key = []byte("b") }))
	snap := k.e.Snapshot()
	defer snap.Close()
	file := filepath.Join(t.TempDir(), "snapshot")
	k.save(snap, file)
	got, err := tools.restore(file, "--bump-revision", "1000", "--mark-compacted").client("", "").Get(t.Context(), "a")
	require.NoError(t, err)
	require.EqualValues(t, 1004, got.Header.Revision)
	require.EqualValues(t, 2, got.Kvs[0].ModRevision)
}

// TestTrivetReadsEtcdSnapshot checks that the files of a snapshot saved by etcdctl, and of the database of a stopped
// etcd, are read with the content that etcd served.
func TestTrivetReadsEtcdSnapshot(t *testing.T) {
	tools := etcdPrograms(t)
	e := tools.newMember()
	ctx := t.Context()
	c := e.client("", "")
	lease, err := c.Grant(ctx, 600)
	require.NoError(t, err)
	for i := range 500 {
		_, err := c.Put(ctx, fmt.Sprintf("many/%d", (i*37)%100), fmt.Sprint(i))
		require.NoError(t, err)
	}
	_, err = c.Put(ctx, "leased", "x", clientv3.WithLease(lease.ID))
	require.NoError(t, err)
	_, err = c.Delete(ctx, "many/1", clientv3.WithPrefix())
	require.NoError(t, err)
	_, err = c.Put(ctx, "many/11", "again")
	require.NoError(t, err)
	_, err = c.RoleAdd(ctx, "r")
	require.NoError(t, err)
	_, err = c.RoleGrantPermission(ctx, "r", "a", "c", clientv3.PermissionType(authpb.Permission_READ))
	require.NoError(t, err)
	_, err = c.UserAdd(ctx, "ann", "secret")
	require.NoError(t, err)
	_, err = c.UserGrantRole(ctx, "ann", "r")
	require.NoError(t, err)
	_, err = c.Delete(ctx, "many/2")
	require.NoError(t, err)
	want, err := c.Get(ctx, "\x00", clientv3.WithFromKey(), clientv3.WithSort(clientv3.SortByKey, clientv3.SortAscend))
	require.NoError(t, err)

	saved := filepath.Join(t.TempDir(), "saved")
	tools.run("etcdctl", "--endpoints", e.endpoint, "snapshot", "save", saved)
	e.stop()
	for _, path := range []string{saved, filepath.Join(e.dir, "member", "snap", "db")} {
		f, err := snapfile.Open(path)
		require.NoError(t, err)
		require.Equal(t, path == saved, f.Verified)
		require.Equal(t, want.Header.Revision, f.Revision)
		require.Equal(t, "3.7.0", f.Version)
		require.EqualValues(t, len(want.Kvs), f.Counts.Keys)
		got, created := map[string]mvcc.KV{}, int64(0)
		for kv, err := range f.Keys() {
			require.NoError(t, err)
			require.Greater(t, kv.CreateRevision, created)
			created = kv.CreateRevision
			got[string(kv.Key)] = fromEtcd([]*mvccpb.KeyValue{kv})[0]
		}
		for _, kv := range fromEtcd(want.Kvs) {
			require.Equal(t, kv, got[string(kv.Key)])
		}
		require.Len(t, f.Leases, 1)
		require.EqualValues(t, lease.ID, f.Leases[0].ID)
		require.EqualValues(t, 600, f.Leases[0].TTL)
		require.Equal(t, []string{"r"}, f.Auth.Users[0].Roles)
		require.Equal(t, "c", string(f.Auth.Roles[0].KeyPermission[0].RangeEnd))
		require.NoError(t, f.Close())
	}
}

func fromEtcd(all []*mvccpb.KeyValue) (kvs []mvcc.KV) {
	for _, kv := range all {
		if kv.Value == nil {
			kv.Value = []byte{}
		}
		kvs = append(kvs, mvcc.KV{Key: kv.Key, Value: kv.Value, CreateRevision: kv.CreateRevision, ModRevision: kv.ModRevision, Version: kv.Version, Lease: kv.Lease})
	}
	return kvs
}

// trivetEngine holds a keyspace of Trivet in memory.
type trivetEngine struct {
	t     *testing.T
	e     *mvcc.Engine
	index uint64
}

func newTrivetEngine(t *testing.T) *trivetEngine {
	e, err := mvcc.Open(vfs.NewMem(), "kv", mvcc.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	return &trivetEngine{t: t, e: e}
}

func (k *trivetEngine) run(steps ...command.Step) {
	k.t.Helper()
	data, err := command.EncodeProgram(command.Program{Steps: steps})
	require.NoError(k.t, err)
	k.index++
	results, err := k.e.Apply([]command.Command{{Index: k.index, Term: 1, Data: data}})
	require.NoError(k.t, err)
	require.NoError(k.t, results[0].Err())
}

func step(kind command.StepKind, set func(*command.Step)) command.Step {
	s := command.Step{Kind: kind}
	set(&s)
	return s
}

func putStep(key, value string, lease int64) command.Step {
	return command.Step{Kind: command.StepPut, Key: []byte(key), Value: []byte(value), Lease: lease}
}

func (k *trivetEngine) users() *users.State {
	k.t.Helper()
	s := k.e.Snapshot()
	defer s.Close()
	state, err := users.Load(func(yield func(name, value []byte) bool) {
		for _, r := range s.Records([]byte(users.Prefix)) {
			if !yield(r.Name, r.Value) {
				return
			}
		}
	})
	require.NoError(k.t, err)
	return state
}

// administer executes an administrative request of etcd's Auth.
func administer[Q, A any](k *trivetEngine, make func(*users.State, Q) ([]command.Step, A, error), q Q) {
	k.t.Helper()
	steps, _, err := make(k.users(), q)
	require.NoError(k.t, err)
	k.run(steps...)
}

// enableAuth adds the users root (password "toor"), ann (password "secret", may read many/) and bot, and enables Auth.
func (k *trivetEngine) enableAuth() {
	for user, password := range map[string]string{"root": "toor", "ann": "secret"} {
		r := &pb.AuthUserAddRequest{Name: user, Password: password}
		require.NoError(k.t, users.HashAdd(r, users.MinCost))
		administer(k, (*users.State).UserAdd, r)
	}
	administer(k, (*users.State).UserAdd, &pb.AuthUserAddRequest{Name: "bot", Options: &authpb.UserAddOptions{NoPassword: true}})
	administer(k, (*users.State).RoleAdd, &pb.AuthRoleAddRequest{Name: "reader"})
	administer(k, (*users.State).RoleGrantPermission, &pb.AuthRoleGrantPermissionRequest{Name: "reader", Perm: &authpb.Permission{Key: []byte("many/"), RangeEnd: []byte("many0")}})
	administer(k, (*users.State).UserGrantRole, &pb.AuthUserGrantRoleRequest{User: "ann", Role: "reader"})
	administer(k, (*users.State).UserGrantRole, &pb.AuthUserGrantRoleRequest{User: "root", Role: "root"})
	administer(k, (*users.State).Enable, &pb.AuthEnableRequest{})
}

func (k *trivetEngine) save(s *mvcc.Snapshot, path string) {
	k.t.Helper()
	leases, err := s.Leases()
	require.NoError(k.t, err)
	state := k.users()
	c := snapfile.Contents{
		Revision: s.Revision(), Index: k.index, Term: 1,
		Members: []snapfile.Member{{ID: 1, Name: "trivet", PeerURLs: []string{"http://127.0.0.1:2380"}}},
		Auth:    snapfile.Auth{Enabled: state.Enabled(), Revision: state.Revision(), Users: state.Users(), Roles: state.Roles()},
		Keys: func(yield func(*mvccpb.KeyValue, error) bool) {
			all, err := s.Range(mvcc.RangeOptions{Key: []byte{0}, End: []byte{0}})
			require.NoError(k.t, err)
			for _, kv := range all.KVs {
				if !yield(&mvccpb.KeyValue{Key: kv.Key, Value: kv.Value, CreateRevision: kv.CreateRevision, ModRevision: kv.ModRevision, Version: kv.Version, Lease: kv.Lease}, nil) {
					return
				}
			}
		},
	}
	for _, l := range leases {
		c.Leases = append(c.Leases, snapfile.Lease{ID: l.ID, TTL: l.TTL})
	}
	f, err := os.Create(path)
	require.NoError(k.t, err)
	require.NoError(k.t, snapfile.Stream(k.t.Context(), f, k.t.TempDir(), c))
	require.NoError(k.t, f.Close())
}

// etcdTools runs etcd's own programs, which are in dir.
type etcdTools struct {
	t   *testing.T
	dir string
}

func etcdPrograms(t *testing.T) etcdTools {
	t.Helper()
	out, err := exec.Command("./build").CombinedOutput()
	require.NoError(t, err, "%s", out)
	dir, err := filepath.Abs("../../../.build/etcd")
	require.NoError(t, err)
	return etcdTools{t, dir}
}

// run runs a program and returns its standard output.
func (a etcdTools) run(name string, args ...string) []byte {
	a.t.Helper()
	c := exec.Command(filepath.Join(a.dir, name), args...)
	out, err := c.Output()
	require.NoError(a.t, err, "%s %v: %s", name, args, stderrOf(err))
	return out
}

func stderrOf(err error) []byte {
	if exit, ok := err.(*exec.ExitError); ok {
		return exit.Stderr
	}
	return nil
}

// etcdMember is an etcd cluster of one member.
type etcdMember struct {
	a              etcdTools
	dir            string
	endpoint, peer string
	process        *exec.Cmd
	ended          chan error
}

func (a etcdTools) newMember() *etcdMember {
	a.t.Helper()
	e := a.member()
	e.start()
	return e
}

// restore restores a snapshot file with etcdutl to a new member, and starts etcd on it.
func (a etcdTools) restore(file string, more ...string) *etcdMember {
	a.t.Helper()
	e := a.member()
	a.run("etcdutl", append([]string{"snapshot", "restore", file, "--data-dir", e.dir, "--name", "m1",
		"--initial-cluster", "m1=" + e.peer, "--initial-advertise-peer-urls", e.peer}, more...)...)
	e.start()
	return e
}

func (a etcdTools) member() *etcdMember {
	a.t.Helper()
	e := &etcdMember{a: a, dir: filepath.Join(a.t.TempDir(), "etcd"), endpoint: freeURL(a.t), peer: freeURL(a.t)}
	a.t.Cleanup(e.stop)
	return e
}

func freeURL(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	return "http://" + l.Addr().String()
}

func (e *etcdMember) start() {
	t := e.a.t
	t.Helper()
	log, err := os.Create(filepath.Join(filepath.Dir(e.dir), "log"))
	require.NoError(t, err)
	c := exec.Command(filepath.Join(e.a.dir, "etcd"), "--name", "m1", "--data-dir", e.dir, "--log-level", "warn", "--bcrypt-cost", "4",
		"--listen-client-urls", e.endpoint, "--advertise-client-urls", e.endpoint, "--listen-peer-urls", e.peer,
		"--initial-advertise-peer-urls", e.peer, "--initial-cluster", "m1="+e.peer)
	c.Stderr = log
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, c.Start())
	e.process, e.ended = c, make(chan error, 1)
	go func() {
		e.ended <- c.Wait()
		log.Close()
	}()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c3 := e.client("", "")
	_, err = c3.Status(ctx, e.endpoint)
	if rpctypes.Error(err) == rpctypes.ErrUserEmpty { // etcd is ready, and Auth is enabled
		err = nil
	}
	output, readErr := os.ReadFile(log.Name())
	require.NoError(t, readErr)
	require.NoError(t, err, "etcd's log:\n%s", output)
}

// stop stops the etcd process, if it runs.
func (e *etcdMember) stop() {
	if e.process == nil {
		return
	}
	require.NoError(e.a.t, e.process.Process.Signal(syscall.SIGTERM))
	<-e.ended
	e.process = nil
}

func (e *etcdMember) client(user, password string) *clientv3.Client {
	t := e.a.t
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{e.endpoint}, Username: user, Password: password,
		DialTimeout: 30 * time.Second, DialOptions: []grpc.DialOption{grpc.WithDefaultCallOptions(grpc.WaitForReady(true))}})
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

package image

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// world holds several members that share one store. Each member has its own image directory.
type world struct {
	t       *testing.T
	now     time.Time
	mu      sync.Mutex // guards now and gates
	records *store.Store
	imports string
	dirs    map[uint64]string
	files   map[uint64]*Files
	gates   map[uint64]chan struct{}
	// readers receives the ID of each member that begins to read an image from another one.
	readers chan uint64
	size    int
	// broken lists the members that other members cannot reach.
	broken map[uint64]bool
	// snapshots is the Snapshots of all members.
	snapshots fakeSnapshots
}

func newWorld(t *testing.T, members int) *world {
	w := &world{
		t: t, now: time.Now(), imports: t.TempDir(), dirs: map[uint64]string{}, files: map[uint64]*Files{},
		gates: map[uint64]chan struct{}{}, readers: make(chan uint64, 1000), size: members, broken: map[uint64]bool{},
	}
	w.records = storetest.Memory(t, func() time.Time { w.mu.Lock(); defer w.mu.Unlock(); return w.now })
	_, err := w.records.Update(t.Context(), func(tx *store.Tx) error {
		if _, err := tenant.CreateOrg(tx, "acme", ""); err != nil {
			return err
		}
		_, err := tenant.CreateProject(tx, cloud.Tenant{Org: "acme", Project: "p"}, "", tenant.Quota{})
		return err
	})
	require.NoError(t, err)
	return w
}

func (w *world) pass(d time.Duration) { w.mu.Lock(); defer w.mu.Unlock(); w.now = w.now.Add(d) }

// member creates the service of a member, as after a restart of its process, with the member's existing directory.
func (w *world) member(id uint64) *Service {
	if w.dirs[id] == "" {
		w.dirs[id] = w.t.TempDir()
	}
	files, err := OpenFiles(w.dirs[id])
	require.NoError(w.t, err)
	w.files[id] = files
	// Every member leads, because all of them share one store.
	commands := leader.NewCommands(id, leadertest.NewLeadership(id), nil)
	return New(Options{
		Store: w.records, Commands: commands, Files: files, Self: id, Members: w.members,
		Peers: &reader{w, id}, ImportDirs: []ImportDir{{Path: w.imports, Orgs: []cloud.OrgID{"acme"}}}, Snapshots: &w.snapshots, Log: slog.New(slog.DiscardHandler),
	})
}

func (w *world) isBroken(member uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.broken[member]
}
func (w *world) setBroken(member uint64, broken bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.broken[member] = broken
}

func (w *world) members() []uint64 {
	var ids []uint64
	for id := range uint64(w.size) {
		ids = append(ids, id+1)
	}
	return ids
}

// reader implements Peers: it reads from the files of the other member. If the reading member has a gate, it first
// waits until the gate is closed.
type reader struct {
	w    *world
	self uint64
}

func (r *reader) ReadImage(ctx context.Context, member uint64, sum string, offset uint64) (io.ReadCloser, error) {
	r.w.mu.Lock()
	gate, files := r.w.gates[r.self], r.w.files[member]
	r.w.mu.Unlock()
	if files == nil || r.w.isBroken(member) {
		return nil, errors.New("the member cannot be reached")
	}
	r.w.readers <- r.self
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	f, err := files.Open(sum)
	if err != nil {
		return nil, err
	}
	_, err = f.Seek(int64(offset), io.SeekStart)
	return f, err
}

// StorePart stores a part on another member. It fails if w.broken lists this other member.
func (r *reader) StorePart(ctx context.Context, member uint64, sum string, part []byte) error {
	r.w.mu.Lock()
	files, broken := r.w.files[member], r.w.broken[member]
	r.w.mu.Unlock()
	if files == nil || broken {
		return errors.New("the member cannot be reached")
	}
	return files.StorePart(ctx, sum, bytes.NewReader(part))
}

// run runs a member's Run until the end of the test or a call of stop.
func (w *world) run(s *Service) (stop func()) {
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan struct{})
	go func() { defer close(done); s.Run(ctx) }()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	w.t.Cleanup(stop)
	return stop
}

func (w *world) write(name string, data []byte) (url string) {
	path := filepath.Join(w.imports, name)
	require.NoError(w.t, os.WriteFile(path, data, 0o600))
	return "file://" + path
}

// until waits until the image with this ID has a record for which ok returns true. what describes that condition in the
// failure message.
func (w *world) until(id cloud.ImageID, what string, ok func(*cloud.Image) bool) *cloud.Image {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 30*time.Second)
	defer cancel()
	i, err := store.Await(ctx, w.records, Images, func(i *cloud.Image) (bool, error) { return i != nil && ok(i), nil }, string(id))
	require.NoError(w.t, err, "%s: %+v", what, i)
	return i
}

func (w *world) settled(id cloud.ImageID) *cloud.Image {
	w.t.Helper()
	return w.until(id, "settled", func(i *cloud.Image) bool { return i.Status == cloud.ImageAvailable || i.Status == cloud.ImageError })
}

func (w *world) kept(member uint64) []string {
	entries, err := os.ReadDir(w.dirs[member])
	require.NoError(w.t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func as(t *testing.T, org cloud.OrgID, key string, roles ...cloud.Role) context.Context {
	c := &cloud.Caller{User: "ada", Proof: cloud.ProofPassword, Scope: cloud.Tenant{Org: org, Project: "p"}, IdempotencyKey: key}
	for _, r := range roles {
		b := cloud.Binding{Role: r}
		if r == cloud.SystemAdmin {
			c.Scope = cloud.Tenant{}
		} else {
			b.Org, b.Project = org, "p"
		}
		c.Bindings = append(c.Bindings, b)
	}
	return auth.With(t.Context(), c, auth.RPC)
}

func member(t *testing.T) context.Context { return as(t, "acme", "", cloud.ProjectMember) }
func admin(t *testing.T) context.Context  { return as(t, "acme", "", cloud.SystemAdmin) }

// imageNumber is the number in the name of the last image that described has returned.
var imageNumber atomic.Uint64

// described returns the description of an image with a name of its own.
func described(url string) cloud.Image {
	return cloud.Image{Name: fmt.Sprintf("debian-%d", imageNumber.Add(1)), Org: "acme", Source: url}
}

func noise(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

func sumOf(b []byte) string { sum := sha256.Sum256(b); return hex.EncodeToString(sum[:]) }

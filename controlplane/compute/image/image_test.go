package image

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
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
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
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
}

func newWorld(t *testing.T, members int) *world {
	w := &world{
		t: t, now: time.Now(), imports: t.TempDir(), dirs: map[uint64]string{}, files: map[uint64]*Files{},
		gates: map[uint64]chan struct{}{}, readers: make(chan uint64, 1000), size: members,
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
		Store: w.records, Commands: commands, Files: files, Self: id, Members: func() int { return w.size },
		Peers: &reader{w, id}, ImportDirs: []ImportDir{{Path: w.imports, Orgs: []cloud.OrgID{"acme"}}}, Log: slog.New(slog.DiscardHandler),
	})
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

func described(url string) cloud.Image { return cloud.Image{Name: "debian", Org: "acme", Source: url} }

func noise(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

func sumOf(b []byte) string { sum := sha256.Sum256(b); return hex.EncodeToString(sum[:]) }

// TestMajority imports an image in a cluster of three members. The image must be PENDING at once, UPLOADING when the
// importer has its copy, and AVAILABLE when a second member has one. The third member must copy it too.
func TestMajority(t *testing.T) {
	w := newWorld(t, 3)
	data := noise(3 << 20)
	for _, id := range []uint64{2, 3} {
		w.gates[id] = make(chan struct{})
	}
	s := w.member(1)
	w.run(s)
	w.run(w.member(2))
	w.run(w.member(3))
	made, err := s.Create(member(t), described(w.write("disk.raw", data)), [32]byte{})
	require.NoError(t, err)
	require.Equal(t, cloud.ImagePending, made.Image.Status)
	require.Equal(t, cloud.Private, made.Image.Visibility)
	id := made.Image.ID

	i := w.until(id, "imported", func(i *cloud.Image) bool { return i.Status != cloud.ImagePending })
	require.Equal(t, cloud.ImageUploading, i.Status, "one of three is no majority")
	require.Equal(t, sumOf(data), i.SHA256)
	require.EqualValues(t, len(data), i.SizeBytes)
	require.EqualValues(t, len(data), i.VirtualSize)
	require.Equal(t, cloud.FormatRaw, i.Format)
	require.Equal(t, []uint64{1}, i.Holders)
	lookup := func() error {
		return w.records.Local(func(v *store.View) error { _, err := Lookup(v, "acme", id); return err })
	}
	require.ErrorContains(t, lookup(), "UPLOADING, not AVAILABLE")

	close(w.gates[2])
	i = w.until(id, "held by two", func(i *cloud.Image) bool { return len(i.Holders) == 2 })
	require.Equal(t, cloud.ImageAvailable, i.Status, "two of three are a majority")
	require.NoError(t, lookup())
	close(w.gates[3])
	i = w.until(id, "held by all", func(i *cloud.Image) bool { return len(i.Holders) == 3 })
	for member, files := range w.files {
		f, err := files.Open(i.SHA256)
		require.NoError(t, err, member)
		got, err := io.ReadAll(f)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		require.True(t, bytes.Equal(data, got), member)
	}

	require.NoError(t, s.Delete(member(t), "acme", id, [32]byte{}))
	require.NoError(t, w.files[1].sweep(nil, time.Now(), sweepAge))
	require.Len(t, w.kept(1), 1, "young files may belong to an import in progress")
	require.NoError(t, w.files[1].sweep(nil, time.Now().Add(2*sweepAge), sweepAge))
	require.Empty(t, w.kept(1))
}

// TestCreateIsIdempotent repeats CreateImage under an idempotency key. It must return the first response, also on
// another member and after the source was removed.
func TestCreateIsIdempotent(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	url := w.write("disk.raw", noise(1000))
	ctx := as(t, "acme", "key-1", cloud.ProjectMember)
	first, err := s.Create(ctx, described(url), [32]byte{1})
	require.NoError(t, err)
	require.False(t, first.Replayed)
	require.NoError(t, os.Remove(strings.TrimPrefix(url, "file://")))

	again, err := s.Create(ctx, described(url), [32]byte{1})
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, first.Image, again.Image)
	again, err = w.member(2).Create(ctx, described(url), [32]byte{1})
	require.NoError(t, err)
	require.Equal(t, first.Image, again.Image)
	_, err = s.Create(ctx, described(url), [32]byte{2})
	require.True(t, fault.Is(err, fault.InvalidArgument), "another body: %v", err)
	for _, key := range []string{"", "key-2"} {
		_, err = s.Create(as(t, "acme", key, cloud.ProjectMember), described(url), [32]byte{1})
		require.True(t, fault.Is(err, fault.NotFound), "key %q: %v", key, err)
	}
	list, _, err := s.List(member(t), "acme", true, 0, "")
	require.NoError(t, err)
	require.Len(t, list, 1)
}

// TestRestartContinuesImport stops a member during an import. The image must stay PENDING, and the member must import
// it after a restart.
func TestRestartContinuesImport(t *testing.T) {
	w := newWorld(t, 1)
	data := noise(1000)
	url := w.write("disk.raw", data)
	s := w.member(1)
	made, err := s.Create(member(t), described(url), [32]byte{})
	require.NoError(t, err)
	stopped, stop := context.WithCancel(t.Context())
	stop()
	from, err := s.open(member(t), "acme", url)
	require.NoError(t, err)
	require.ErrorIs(t, s.importFrom(stopped, made.Image, from), context.Canceled)
	require.Empty(t, w.kept(1))

	s = w.member(1)
	halt := w.run(s)
	i := w.settled(made.Image.ID)
	require.Equal(t, cloud.ImageAvailable, i.Status)
	require.Equal(t, []string{sumOf(data)}, w.kept(1))
	halt()

	// If the source is removed between Create and the restart, the image must become ERROR.
	url = w.write("other.raw", noise(1000))
	s = w.member(1)
	made, err = s.Create(member(t), described(url), [32]byte{})
	require.NoError(t, err)
	require.NoError(t, os.Remove(strings.TrimPrefix(url, "file://")))
	w.run(w.member(1))
	i = w.settled(made.Image.ID)
	require.Equal(t, cloud.ImageError, i.Status)
	require.Equal(t, "the source no longer exists", i.Metadata[cloud.ImageReason])
}

// TestStopWaitsForCopies checks that Run returns only after running copies have ended, and that OpenFiles removes
// incomplete files that a crash left.
func TestStopWaitsForCopies(t *testing.T) {
	w := newWorld(t, 3)
	w.gates[2] = make(chan struct{})
	one, two := w.member(1), w.member(2)
	w.run(one)
	stop := w.run(two)
	made, err := one.Create(member(t), described(w.write("disk.raw", noise(1000))), [32]byte{})
	require.NoError(t, err)
	w.until(made.Image.ID, "imported", func(i *cloud.Image) bool { return i.Status == cloud.ImageUploading })
	require.EqualValues(t, 2, <-w.readers)
	require.Len(t, w.kept(2), 1, "an incomplete image")
	stop()
	require.Empty(t, w.kept(2), "the pull has ended and cleaned up")

	require.NoError(t, os.WriteFile(filepath.Join(w.dirs[2], partPrefix+"crashed"), []byte("half"), 0o600))
	w.member(2)
	require.Empty(t, w.kept(2))
}

// TestUnfinishedImportsTimeOut checks that an image becomes ERROR if its importer does not finish within importTime, or
// if no majority copies it within importTime.
func TestUnfinishedImportsTimeOut(t *testing.T) {
	w := newWorld(t, 3)
	s := w.member(1)
	put := func(i cloud.Image) cloud.ImageID {
		i.ID = cloud.ImageID("01890000-0000-7000-8000-00000000000" + i.Name)
		_, err := w.records.Update(t.Context(), func(tx *store.Tx) error {
			i.CreatedAt, i.UpdatedAt = tx.Now(), tx.Now()
			Images.Put(tx, &i, string(i.ID))
			return nil
		})
		require.NoError(t, err)
		return i.ID
	}
	pending := put(cloud.Image{Name: "1", Org: "acme", Status: cloud.ImagePending, Importer: 2})
	uploading := put(cloud.Image{Name: "2", Org: "acme", Status: cloud.ImageUploading, Importer: 3, SHA256: sumOf(nil), Holders: []uint64{3}})
	available := put(cloud.Image{Name: "3", Org: "acme", Status: cloud.ImageAvailable, Importer: 3, SHA256: sumOf(nil), Holders: []uint64{2, 3}})
	get := func(id cloud.ImageID) *cloud.Image {
		i, err := s.Get(t.Context(), "acme", id)
		require.NoError(t, err)
		return i
	}
	w.pass(importTime - time.Second)
	require.NoError(t, s.Settle(t.Context()))
	require.Equal(t, cloud.ImagePending, get(pending).Status)
	require.Equal(t, cloud.ImageUploading, get(uploading).Status)
	w.pass(2 * time.Second)
	require.NoError(t, s.Settle(t.Context()))
	require.Equal(t, "member 2 did not finish the import", get(pending).Metadata[cloud.ImageReason])
	require.Equal(t, cloud.ImageError, get(uploading).Status)
	require.Contains(t, get(uploading).Metadata[cloud.ImageReason], "member 3 imported it")
	require.Equal(t, cloud.ImageAvailable, get(available).Status)

	// Results that arrive after the timeout must change nothing.
	_, err := finishImportCommand.Call(t.Context(), s.opts.Commands, importResult{ID: pending, Member: 2, SHA256: sumOf(nil)})
	require.NoError(t, err)
	_, err = addHolderCommand.Call(t.Context(), s.opts.Commands, holderRequest{uploading, 1, sumOf(nil)})
	require.NoError(t, err)
	require.Equal(t, cloud.ImageError, get(pending).Status)
	require.Empty(t, get(uploading).Holders)
}

// TestLostCopyIsPulledAgain deletes image files. A member without its file must remove itself from the holders and pull
// the image again. When the last copy is lost, the image must become ERROR.
func TestLostCopyIsPulledAgain(t *testing.T) {
	w := newWorld(t, 2)
	one, two := w.member(1), w.member(2)
	stopOne, stopTwo := w.run(one), w.run(two)
	made, err := one.Create(member(t), described(w.write("disk.raw", noise(1000))), [32]byte{})
	require.NoError(t, err)
	i := w.until(made.Image.ID, "held", func(i *cloud.Image) bool { return len(i.Holders) == 2 })
	stopOne()
	stopTwo()

	require.NoError(t, os.Remove(filepath.Join(w.dirs[2], i.SHA256)))
	require.NoError(t, w.member(2).pullAndRecord(t.Context(), i))
	require.Len(t, w.kept(2), 1)
	now, err := one.Get(t.Context(), "acme", i.ID)
	require.NoError(t, err)
	require.Equal(t, []uint64{1, 2}, now.Holders)

	for member := range w.dirs {
		require.NoError(t, os.Remove(filepath.Join(w.dirs[member], i.SHA256)))
	}
	for _, s := range []*Service{w.member(1), w.member(2)} {
		require.Error(t, s.pullAndRecord(t.Context(), i))
	}
	now, err = one.Get(t.Context(), "acme", i.ID)
	require.NoError(t, err)
	require.Equal(t, cloud.ImageError, now.Status)
	require.Contains(t, now.Metadata[cloud.ImageReason], "lost on member 2")
}

func TestUsedImageIsNotDeleted(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	w.run(s)
	i := described(w.write("disk.raw", noise(1000)))
	i.Visibility = cloud.Public
	made, err := s.Create(admin(t), i, [32]byte{})
	require.NoError(t, err)
	id := w.settled(made.Image.ID).ID
	use := func(org cloud.OrgID, vm cloud.VMID) {
		_, err := w.records.Update(t.Context(), func(tx *store.Tx) error {
			u, err := Lookup(tx, org, id)
			if err != nil {
				return err
			}
			u.Use(tx, vm)
			return nil
		})
		require.NoError(t, err)
	}
	use("acme", "vm-own")
	use("other", "vm-other")
	err = s.Delete(member(t), "acme", id, [32]byte{})
	require.True(t, fault.Is(err, fault.FailedPrecondition))
	require.ErrorContains(t, err, "used by VM vm-own, other VMs")
	require.NotContains(t, err.Error(), "vm-other", "the VMs of another org must not be named")
	for _, vm := range []cloud.VMID{"vm-own", "vm-other"} {
		_, err = w.records.Update(t.Context(), func(tx *store.Tx) error { Release(tx, id, vm); return nil })
		require.NoError(t, err)
	}
	require.NoError(t, s.Delete(member(t), "acme", id, [32]byte{}))
	_, err = s.Get(t.Context(), "acme", id)
	require.True(t, fault.Is(err, fault.NotFound))
	err = s.Delete(member(t), "acme", id, [32]byte{})
	require.True(t, fault.Is(err, fault.NotFound))

	// A repeated Delete under the same idempotency key must return the same response.
	made, err = s.Create(member(t), described(w.write("disk.raw", noise(1000))), [32]byte{})
	require.NoError(t, err)
	for range 2 {
		require.NoError(t, s.Delete(as(t, "acme", "key", cloud.ProjectMember), "acme", made.Image.ID, [32]byte{7}))
	}
}

// TestVisibility checks which callers may give an image which visibility, by Create and by Update.
func TestVisibility(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	url := w.write("disk.raw", noise(1000))
	for _, c := range []struct {
		name     string
		v        cloud.Visibility
		metadata map[string]string
		admin    bool
		kind     fault.Kind
		says     string
	}{
		{name: "nothing said is private"},
		{name: "private", v: cloud.Private},
		{name: "a member publishes", v: cloud.Public, kind: fault.PermissionDenied, says: "only system:admin may publish"},
		{name: "an administrator publishes", v: cloud.Public, admin: true},
		{name: "shared without orgs", v: cloud.Shared, kind: fault.InvalidArgument, says: "trivet/shared-with"},
		{name: "shared", v: cloud.Shared, metadata: map[string]string{cloud.SharedWith: "b,c"}},
		{name: "shared with an invalid org ID", v: cloud.Shared, metadata: map[string]string{cloud.SharedWith: "b, c"}, kind: fault.InvalidArgument, says: `" c" is not an org ID`},
		{name: "a reserved key", metadata: map[string]string{cloud.ImageReason: "x"}, kind: fault.InvalidArgument, says: "set by the control plane only"},
		{name: "no visibility at all", v: 9, kind: fault.InvalidArgument, says: "visibility"},
	} {
		t.Run(c.name, func(t *testing.T) {
			i := described(url)
			i.Visibility, i.Metadata = c.v, c.metadata
			ctx := member(t)
			if c.admin {
				ctx = admin(t)
			}
			made, err := s.Create(ctx, i, [32]byte{})
			if c.says == "" {
				require.NoError(t, err)
				return
			}
			require.True(t, fault.Is(err, c.kind), "%v", err)
			require.ErrorContains(t, err, c.says)
			require.Empty(t, made.Image.ID)
			// Update must be refused like Create.
			private, err := s.Create(member(t), described(url), [32]byte{})
			require.NoError(t, err)
			_, err = s.Update(member(t), "acme", private.Image.ID, "", c.v, c.metadata)
			require.True(t, fault.Is(err, c.kind), "%v", err)
			now, err := s.Get(t.Context(), "acme", private.Image.ID)
			require.NoError(t, err)
			require.Equal(t, private.Image, *now)
		})
	}
}

// TestVisibilityInLists checks which of a private, a shared and a public image of one org each of three orgs can list,
// read, update and delete.
func TestVisibilityInLists(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	url := w.write("disk.raw", noise(1000))
	ids := map[string]cloud.ImageID{}
	for name, i := range map[string]cloud.Image{
		"private": {Visibility: cloud.Private},
		"shared":  {Visibility: cloud.Shared, Metadata: map[string]string{cloud.SharedWith: "friend,other", "k": "v"}},
		"public":  {Visibility: cloud.Public},
	} {
		i.Name, i.Org, i.Source = name, "acme", url
		made, err := s.Create(admin(t), i, [32]byte{})
		require.NoError(t, err)
		ids[name] = made.Image.ID
	}
	for _, c := range []struct {
		org              cloud.OrgID
		sees, withPublic []string
		changes          bool
	}{
		{"acme", []string{"private", "shared", "public"}, []string{"private", "shared", "public"}, true},
		{"friend", []string{"shared"}, []string{"shared", "public"}, false},
		{"stranger", nil, []string{"public"}, false},
	} {
		for public, want := range map[bool][]string{false: c.sees, true: c.withPublic} {
			list, next, err := s.List(t.Context(), c.org, public, 0, "")
			require.NoError(t, err)
			require.Empty(t, next)
			var got []string
			for _, i := range list {
				got = append(got, i.Name)
			}
			require.ElementsMatch(t, want, got, "%s, public %v", c.org, public)
		}
		for name, id := range ids {
			seen := false
			for _, n := range c.withPublic {
				seen = seen || n == name
			}
			i, err := s.Get(t.Context(), c.org, id)
			_, changed := s.Update(as(t, c.org, "", cloud.SystemAdmin), c.org, id, "", 0, map[string]string{"x": "y"})
			switch {
			case !seen:
				require.True(t, fault.Is(err, fault.NotFound))
				require.True(t, fault.Is(changed, fault.NotFound))
				require.True(t, fault.Is(s.Delete(member(t), c.org, id, [32]byte{}), fault.NotFound))
				continue
			case c.changes:
				require.NoError(t, changed)
			default:
				require.True(t, fault.Is(changed, fault.PermissionDenied))
				require.True(t, fault.Is(s.Delete(member(t), c.org, id, [32]byte{}), fault.PermissionDenied))
			}
			require.NoError(t, err)
			_, visible := toProto(i, c.org).Metadata[cloud.SharedWith]
			require.Equal(t, name == "shared" && c.org == "acme", visible, "only the owner sees with whom it is shared")
			require.Equal(t, convert.Image(i).GetChecksum(), toProto(i, c.org).GetChecksum())
		}
	}
	// A page token must be valid only for the list that returned it.
	_, next, err := s.List(t.Context(), "acme", false, 1, "")
	require.NoError(t, err)
	require.NotEmpty(t, next)
	for _, org := range []cloud.OrgID{"friend", "stranger"} {
		_, _, err = s.List(t.Context(), org, false, 1, next)
		require.True(t, fault.Is(err, fault.InvalidArgument))
	}
	_, _, err = s.List(t.Context(), "acme", true, 1, next)
	require.True(t, fault.Is(err, fault.InvalidArgument))
	for _, id := range []cloud.ImageID{"", "x", "../../etc/shadow"} {
		_, err = s.Get(t.Context(), "acme", id)
		require.True(t, fault.Is(err, fault.InvalidArgument), id)
	}
}

// TestBackgroundJobs checks that each job runs once at a time, that the number of concurrent jobs is limited, that a
// failed job pauses before it runs again, and that close waits for running jobs.
func TestBackgroundJobs(t *testing.T) {
	woken := make(chan struct{}, 100)
	var failed []string
	e := newBackgroundJobs(func() { woken <- struct{}{} }, func(name string, _ error) { failed = append(failed, name) })
	slots, gate := make(chan struct{}, 2), make(chan struct{})
	wait := func(context.Context) error { <-gate; return nil }
	require.False(t, e.start("early", slots, wait), "nothing runs before Run")
	ctx, cancel := context.WithCancel(t.Context())
	e.open(ctx)
	require.True(t, e.start("a", slots, wait))
	require.False(t, e.start("a", slots, wait), "one run of a job at a time")
	require.True(t, e.start("b", slots, wait))
	require.False(t, e.start("c", slots, wait), "two at a time")
	close(gate)
	<-woken
	<-woken
	require.True(t, e.start("c", slots, func(context.Context) error { return errors.New("no") }))
	<-woken
	require.Equal(t, []string{"c"}, failed)
	require.False(t, e.start("c", slots, wait), "the job is paused")
	for times, rest := range []time.Duration{2 * minBackoff, 4 * minBackoff, 8 * minBackoff, 16 * minBackoff, 32 * minBackoff, maxBackoff, maxBackoff} {
		now := time.Now()
		e.recordResult("c", errors.New("no"), now)
		require.Equal(t, rest, e.failed["c"].until.Sub(now), times)
	}
	e.recordResult("c", nil, time.Now())
	ended := false
	require.True(t, e.start("c", slots, func(ctx context.Context) error {
		<-ctx.Done()
		for range 1000 {
			runtime.Gosched()
		}
		ended = true
		return ctx.Err()
	}))
	cancel()
	e.close()
	require.True(t, ended, "close waits")
	require.Equal(t, []string{"c"}, failed, "being stopped is no failure")
	require.False(t, e.start("late", slots, wait))
}

// TestQuota checks that an image counts in the quota of its creator's project until it is deleted.
func TestQuota(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	one := uint64(1)
	_, err := w.records.Update(t.Context(), func(tx *store.Tx) error {
		return tenant.SetQuota(tx, "p", tenant.Quota{Images: &one})
	})
	require.NoError(t, err)
	url := w.write("disk.raw", noise(1000))
	first, err := s.Create(member(t), described(url), [32]byte{})
	require.NoError(t, err)
	require.EqualValues(t, "p", first.Image.Project)
	_, err = s.Create(member(t), described(url), [32]byte{})
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.ErrorContains(t, err, "allows 1 images: 1 are used")
	require.NoError(t, s.Delete(member(t), "acme", first.Image.ID, [32]byte{}))
	_, err = s.Create(member(t), described(url), [32]byte{})
	require.NoError(t, err)
}

// TestOrgQuota checks that images count in the quota of the org of their project until they are deleted.
func TestOrgQuota(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	set := func(limit uint64) {
		_, err := w.records.Update(t.Context(), func(tx *store.Tx) error {
			return tenant.SetOrgQuota(tx, "acme", tenant.Quota{Images: &limit})
		})
		require.NoError(t, err)
	}
	set(1)
	url := w.write("disk.raw", noise(1000))
	first, err := s.Create(member(t), described(url), [32]byte{})
	require.NoError(t, err)
	_, err = s.Create(member(t), described(url), [32]byte{})
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.ErrorContains(t, err, "the quota of org acme (shared by its projects) allows 1 images: 1 are used")
	require.NoError(t, s.Delete(member(t), "acme", first.Image.ID, [32]byte{}))
	_, err = s.Create(member(t), described(url), [32]byte{})
	require.NoError(t, err)
}

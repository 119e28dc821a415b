package image

import (
	"bytes"
	"context"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/qcow2"
	"github.com/trivet-cloud/trivet/shared/rbddiff"
)

const testSnapshot = cloud.SnapshotID("0190a000-0000-7000-8000-0000000000aa")

// fakeSnapshots implements Snapshots for the project acme/p, which has the snapshot testSnapshot with the content disk.
type fakeSnapshots struct {
	mu     sync.Mutex
	disk   []byte
	failed error // of Export after the first range
	calls  int
}

func (f *fakeSnapshots) fail(err error) { f.mu.Lock(); defer f.mu.Unlock(); f.failed = err }
func (f *fakeSnapshots) count() int     { f.mu.Lock(); defer f.mu.Unlock(); return f.calls }

func (f *fakeSnapshots) Check(_ context.Context, t cloud.Tenant, id cloud.SnapshotID) error {
	if t != (cloud.Tenant{Org: "acme", Project: "p"}) || id != testSnapshot {
		return fault.New(fault.NotFound, "no snapshot %s", id)
	}
	return nil
}

func (f *fakeSnapshots) Export(ctx context.Context, t cloud.Tenant, id, since cloud.SnapshotID, offset uint64, send func([]byte) error) error {
	f.mu.Lock()
	f.calls++
	failed := f.failed
	f.mu.Unlock()
	if err := f.Check(ctx, t, id); err != nil || since != "" || offset != 0 {
		return fault.New(fault.InvalidArgument, "unexpected call: %v %v %d", err, since, offset)
	}
	w, err := rbddiff.NewWriter(sender(send), rbddiff.Header{To: string(id), Size: uint64(len(f.disk))})
	if err != nil {
		return err
	}
	for at := 0; at < len(f.disk); at += 64 << 10 {
		piece := f.disk[at:min(len(f.disk), at+64<<10)]
		if bytes.Equal(piece, make([]byte, len(piece))) {
			continue
		}
		if err := w.Write(rbddiff.Range{Offset: uint64(at), Length: uint64(len(piece)), Data: piece}); err != nil {
			return err
		}
		if failed != nil {
			return failed
		}
	}
	return w.Close()
}

type sender func([]byte) error

func (s sender) Write(b []byte) (int, error) { return len(b), s(b) }

func fromSnapshot() cloud.Image {
	i := described("")
	i.Source = "snapshot:" + string(testSnapshot)
	return i
}

// TestImageFromSnapshot makes an image from a snapshot whose host cannot be reached at first, and compares the
// content. The member is restarted, so that it repeats the import at once.
func TestImageFromSnapshot(t *testing.T) {
	w := newWorld(t, 1)
	w.snapshots.disk = append(noise(200_000), make([]byte, 3<<20-200_000)...)
	copy(w.snapshots.disk[3<<20-700:], noise(700))
	w.snapshots.fail(fault.New(fault.Unavailable, "the host is away"))
	s := w.member(1)
	stop := w.run(s)
	made, err := s.Create(member(t), fromSnapshot(), [32]byte{})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return w.snapshots.count() == 1 }, 30*time.Second, time.Millisecond)
	stop()
	pending, err := s.Get(member(t), "acme", made.Image.ID)
	require.NoError(t, err)
	require.Equal(t, cloud.ImagePending, pending.Status)
	w.snapshots.fail(nil)
	s = w.member(1)
	w.run(s)
	got := w.settled(made.Image.ID)
	require.Equal(t, cloud.ImageAvailable, got.Status, got.Metadata)
	require.Equal(t, cloud.FormatQCOW2, got.Format)
	require.EqualValues(t, 3<<20, got.VirtualSize)
	require.Equal(t, []string{got.SHA256}, w.kept(1), "no incomplete file is left")
	path, err := s.opts.Files.path(got.SHA256)
	require.NoError(t, err)
	file, err := os.Open(path)
	require.NoError(t, err)
	defer file.Close()
	info, err := file.Stat()
	require.NoError(t, err)
	require.Less(t, info.Size(), int64(1<<20), "zeros take no space")
	require.EqualValues(t, got.SizeBytes, info.Size())
	d, err := qcow2.NewReader(file, info.Size())
	require.NoError(t, err)
	content := make([]byte, 3<<20)
	_, err = d.ReadAt(content, 0)
	require.NoError(t, err)
	require.True(t, bytes.Equal(w.snapshots.disk, content))
}

// TestImageFromSnapshotWaits checks that an image stays PENDING after an error that may pass, and becomes AVAILABLE
// afterwards.
func TestImageFromSnapshotWaits(t *testing.T) {
	w := newWorld(t, 1)
	w.snapshots.disk = noise(300_000 / 512 * 512)
	w.snapshots.fail(fault.New(fault.ResourceExhausted, "project acme/p has 4 reads of snapshots").MayRetry())
	s := w.member(1)
	w.run(s)
	made, err := s.Create(member(t), fromSnapshot(), [32]byte{})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return w.snapshots.count() == 1 }, 30*time.Second, time.Millisecond)
	w.snapshots.fail(nil)
	got := w.settled(made.Image.ID)
	require.Equal(t, cloud.ImageAvailable, got.Status, got.Metadata)
}

// TestImageFromSnapshotFails checks that a snapshot that was deleted, or whose content is damaged, makes the image ERROR
// with the reason, and leaves no file.
func TestImageFromSnapshotFails(t *testing.T) {
	for reason, failed := range map[string]error{
		"the snapshot cannot be read: no snapshot": fault.New(fault.NotFound, "no snapshot %s", testSnapshot),
		"the import failed on member 1":            context.Canceled,
	} {
		w := newWorld(t, 1)
		w.snapshots.disk = noise(300_000 / 512 * 512)
		w.snapshots.fail(failed)
		s := w.member(1)
		w.run(s)
		made, err := s.Create(member(t), fromSnapshot(), [32]byte{})
		require.NoError(t, err)
		got := w.settled(made.Image.ID)
		require.Equal(t, cloud.ImageError, got.Status)
		require.Contains(t, got.Metadata[cloud.ImageReason], reason)
		require.Empty(t, w.kept(1))
	}
}

// TestImageFromSnapshotIsRefused checks which images CreateImage refuses to make from a snapshot.
func TestImageFromSnapshotIsRefused(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	for name, c := range map[string]struct {
		change func(*cloud.Image)
		kind   fault.Kind
	}{
		"unknown":   {func(i *cloud.Image) { i.Source = "snapshot:0190a000-0000-7000-8000-0000000000ab" }, fault.NotFound},
		"no UUID":   {func(i *cloud.Image) { i.Source = "snapshot:../x" }, fault.InvalidArgument},
		"RAW":       {func(i *cloud.Image) { i.Format = cloud.FormatRaw }, fault.InvalidArgument},
		"checksum":  {func(i *cloud.Image) { i.Metadata = map[string]string{cloud.SourceSHA256: sumOf(nil)} }, fault.InvalidArgument},
		"other org": {func(i *cloud.Image) { i.Org = "other" }, fault.PermissionDenied},
	} {
		i := fromSnapshot()
		c.change(&i)
		_, err := s.Create(member(t), i, [32]byte{})
		require.True(t, fault.Is(err, c.kind), "%s: %v", name, err)
	}
}

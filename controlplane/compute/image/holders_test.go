package image

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

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

// TestFormerHolder replaces the member that imported an image. The image must become AVAILABLE only when a majority of
// the present members has it.
func TestFormerHolder(t *testing.T) {
	w := newWorld(t, 3)
	s := w.member(2)
	s.opts.Members = func() []uint64 { return []uint64{2, 3, 4} }
	i := &cloud.Image{Status: cloud.ImageUploading, Holders: []uint64{1}}
	s.addHolder(i, 2)
	require.Equal(t, cloud.ImageUploading, i.Status)
	s.addHolder(i, 4)
	require.Equal(t, cloud.ImageAvailable, i.Status)
	require.Equal(t, []uint64{1, 2, 4}, i.Holders)
}

// TestSweepKeepsHeldFile adds a member that still has the file of a deleted image to the holders of a new image with
// the same bytes. A sweep that has read the records before must not remove the file.
func TestSweepKeepsHeldFile(t *testing.T) {
	w := newWorld(t, 2)
	one, two := w.member(1), w.member(2)
	data := noise(1000)
	require.NoError(t, two.opts.Files.StorePart(t.Context(), sumOf(data), bytes.NewReader(data)))
	w.age(2)
	stop := w.run(one)
	made, err := one.Create(member(t), described(w.write("disk.raw", data)), [32]byte{})
	require.NoError(t, err)
	i := w.until(made.Image.ID, "imported", func(i *cloud.Image) bool { return i.Status == cloud.ImageUploading })
	stop()
	require.NoError(t, two.pullAndRecord(t.Context(), i))
	none := map[string]bool{}
	require.NoError(t, two.opts.Files.sweep(none, time.Now(), sweepAge))
	require.Len(t, w.kept(2), 1)
	require.NoError(t, two.opts.Files.sweep(none, time.Now().Add(2*sweepAge), sweepAge))
	require.Empty(t, w.kept(2))
}

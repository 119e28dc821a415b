package image

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

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

// setByteQuota sets a quota of the given number of MiB of images.
func (w *world) setByteQuota(mib uint64) {
	w.t.Helper()
	_, err := w.records.Update(w.t.Context(), func(tx *store.Tx) error {
		return tenant.SetQuota(tx, "p", tenant.Quota{ImageMiB: &mib})
	})
	require.NoError(w.t, err)
}

// usedMiB returns the usage record of image bytes of the project.
func (w *world) usedMiB() uint64 {
	w.t.Helper()
	var used tenant.Amount
	require.NoError(w.t, w.records.Local(func(v *store.View) (err error) {
		used, err = tenant.Used(v, "p")
		return err
	}))
	return used.ImageMiB
}

// TestImportedBytesCount checks that the bytes of an imported image count until the image is deleted. An image that
// would exceed the quota must become ERROR with this reason, and count nothing.
func TestImportedBytesCount(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	w.run(s)
	w.setByteQuota(3)
	create := func(name string, size int) *cloud.Image {
		made, err := s.Create(member(t), described(w.write(name, noise(size))), [32]byte{})
		require.NoError(t, err)
		return w.settled(made.Image.ID)
	}
	first := create("first.raw", 2<<20-512) // counts 2 MiB
	require.Equal(t, cloud.ImageAvailable, first.Status, first.Metadata)
	require.EqualValues(t, 2, w.usedMiB())
	large := create("large.raw", 2<<20)
	require.Equal(t, cloud.ImageError, large.Status)
	require.Equal(t, "the quota of project p allows 3 image_mib: 2 are used, 2 more are asked for", large.Metadata[cloud.ImageReason])
	require.EqualValues(t, 2, w.usedMiB())
	require.Equal(t, cloud.ImageAvailable, create("small.raw", 1<<20).Status)
	require.EqualValues(t, 3, w.usedMiB())
	w.setByteQuota(0)
	for _, counted := range []uint64{0, first.CountedMiB} { // 0: as if an earlier version had stored the image
		require.NoError(t, s.rewrite(t.Context(), first.ID, func(i *cloud.Image) bool { i.CountedMiB = counted; return true }))
		now := w.settled(first.ID)
		require.Equal(t, cloud.ImageAvailable, now.Status, "a quota must not delete images that are stored already")
		require.Equal(t, counted, now.CountedMiB)
	}
	require.NoError(t, s.Delete(member(t), "acme", large.ID, [32]byte{}))
	require.NoError(t, s.Delete(member(t), "acme", first.ID, [32]byte{}))
	require.EqualValues(t, 1, w.usedMiB())
}

// TestUploadedBytesCount checks that the parts of an upload count as soon as they are stored, each once, and that the
// bytes of the complete image replace them.
func TestUploadedBytesCount(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	w.run(s)
	w.setByteQuota(12)
	u := begin(t, s, described(""))
	put := func(u UploadRef, n uint32, size int) error {
		_, err := s.UploadPart(member(t), u, n, noise(size))
		return err
	}
	require.NoError(t, put(u, 1, MinPartBytes))
	require.NoError(t, put(u, 1, MinPartBytes+1))
	require.NoError(t, put(u, 1, MinPartBytes))
	require.EqualValues(t, 5, w.usedMiB(), "a part that is sent again must count once")
	err := put(u, 2, maxPartBytes)
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.ErrorContains(t, err, "allows 12 image_mib: 5 are used, 8 more are asked for")
	require.NoError(t, put(u, 2, 1000))
	require.EqualValues(t, 6, w.usedMiB())
	done, err := s.CompleteUpload(member(t), u)
	require.NoError(t, err)
	require.Equal(t, cloud.ImageAvailable, done.Status, done.Metadata)
	require.EqualValues(t, 6, w.usedMiB())

	aborted := begin(t, s, described(""))
	require.NoError(t, put(aborted, 1, 1000))
	require.EqualValues(t, 7, w.usedMiB())
	_, err = s.AbortUpload(member(t), aborted, [32]byte{})
	require.NoError(t, err)
	expired := begin(t, s, described(""))
	require.NoError(t, put(expired, 1, 1000))
	w.pass(uploadTime)
	require.NoError(t, s.Settle(t.Context()))
	require.EqualValues(t, 6, w.usedMiB())
	require.NoError(t, s.Delete(member(t), "acme", u.Image, [32]byte{}))
	require.Zero(t, w.usedMiB())
}

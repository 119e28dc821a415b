package image

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// begin begins an upload at a member and returns its reference.
func begin(t *testing.T, s *Service, i cloud.Image) UploadRef {
	t.Helper()
	made, err := s.BeginUpload(member(t), i, [32]byte{})
	require.NoError(t, err)
	require.Equal(t, cloud.ImagePending, made.Image.Status)
	return UploadRef{Org: "acme", Image: made.Image.ID, Session: made.Image.Upload.ID}
}

// abort ends an upload at a member.
func abort(t *testing.T, s *Service, u UploadRef) error {
	_, err := s.AbortUpload(member(t), u, [32]byte{})
	return err
}

// cut cuts data into parts of the given size.
func cut(data []byte, size int) [][]byte { return slices.Collect(slices.Chunk(data, size)) }

// age makes all files that a member has now older than sweepAge.
func (w *world) age(member uint64) {
	for _, name := range w.kept(member) {
		old := time.Now().Add(-2 * sweepAge)
		require.NoError(w.t, os.Chtimes(filepath.Join(w.dirs[member], name), old, old))
	}
}

// TestUpload uploads an image in parts, in any order and through any member, and some parts twice. The image must have
// the bytes of all parts in order, and the parts must leave no files and no records.
func TestUpload(t *testing.T) {
	w := newWorld(t, 3)
	members := []*Service{w.member(1), w.member(2), w.member(3)}
	for _, s := range members {
		w.run(s)
	}
	data := noise(2*MinPartBytes + maxPartBytes + 12345)
	i := described("")
	i.Metadata = map[string]string{cloud.SourceSHA256: sumOf(data)}
	u := begin(t, members[0], i)
	pieces := [][]byte{data[:MinPartBytes], data[MinPartBytes : MinPartBytes+maxPartBytes], data[MinPartBytes+maxPartBytes : 2*MinPartBytes+maxPartBytes],
		data[2*MinPartBytes+maxPartBytes:]}
	for at, n := range []uint32{3, 1, 4, 1, 2, 3} {
		size, err := members[at%3].UploadPart(member(t), u, n, pieces[n-1])
		require.NoError(t, err)
		require.EqualValues(t, len(pieces[n-1]), size)
	}
	list, more, err := members[2].Parts(member(t), u, 1, 2)
	require.NoError(t, err)
	require.True(t, more)
	require.Len(t, list, 2)
	require.EqualValues(t, 2, list[0].Number)
	require.Equal(t, sumOf(pieces[1]), list[0].SHA256)
	require.Len(t, list[0].Holders, 2, "a majority of three")

	done, err := members[1].CompleteUpload(member(t), u)
	require.NoError(t, err)
	require.Equal(t, cloud.ImageAvailable, done.Status, done.Metadata)
	require.Equal(t, sumOf(data), done.SHA256)
	require.EqualValues(t, len(data), done.SizeBytes)
	w.until(u.Image, "all members have it", func(i *cloud.Image) bool { return len(i.Holders) == 3 })

	again, err := members[2].CompleteUpload(member(t), u)
	require.NoError(t, err)
	require.Equal(t, done.SHA256, again.SHA256)
	_, err = members[0].UploadPart(member(t), u, 1, pieces[0])
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)

	require.NoError(t, members[0].Settle(t.Context()))
	requireNoParts(t, w)
	for n, s := range members {
		w.age(uint64(n + 1))
		require.NoError(t, s.sweep(t.Context()))
		require.Equal(t, []string{sumOf(data)}, w.kept(uint64(n+1)))
		got, err := os.ReadFile(filepath.Join(w.dirs[uint64(n+1)], sumOf(data)))
		require.NoError(t, err)
		require.True(t, bytes.Equal(data, got))
	}
}

func requireNoParts(t *testing.T, w *world) {
	t.Helper()
	require.NoError(t, w.records.Local(func(v *store.View) error {
		left, _, err := parts.List(v, 0)
		require.Empty(t, left)
		return err
	}))
}

// TestPartNeedsMajority checks that a part is acknowledged only when a majority of the members has it, so that the
// upload can be completed when the member that received the part has failed.
func TestPartNeedsMajority(t *testing.T) {
	w := newWorld(t, 3)
	first, second := w.member(1), w.member(2)
	w.member(3)
	u := begin(t, first, described(""))
	data := noise(1000)
	w.setBroken(2, true)
	w.setBroken(3, true)
	_, err := first.UploadPart(member(t), u, 1, data)
	require.True(t, fault.Is(err, fault.Unavailable), "acknowledged without a majority: %v", err)
	list, _, err := second.Parts(member(t), u, 0, 10)
	require.NoError(t, err)
	require.Empty(t, list)

	w.setBroken(2, false)
	_, err = first.UploadPart(member(t), u, 1, data)
	require.NoError(t, err)
	w.setBroken(1, true)
	w.setBroken(3, false)
	third := w.member(3)
	w.run(second)
	w.run(third)
	done, err := third.CompleteUpload(member(t), u)
	require.NoError(t, err)
	require.Equal(t, cloud.ImageAvailable, done.Status, done.Metadata)
	require.Equal(t, sumOf(data), done.SHA256)
}

// TestDamagedPart checks that a part is read from another member if this member's file of the part is damaged.
func TestDamagedPart(t *testing.T) {
	w := newWorld(t, 2)
	one, two := w.member(1), w.member(2)
	u := begin(t, one, described(""))
	data := noise(1000)
	_, err := one.UploadPart(member(t), u, 1, data)
	require.NoError(t, err)
	path := filepath.Join(w.dirs[1], sumOf(data))
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.WriteFile(path, noise(1000), 0o400))
	// The joined image replaces the damaged file, because the image and its only part have the same bytes.
	w.run(one)
	w.run(two)
	done, err := one.CompleteUpload(member(t), u)
	require.NoError(t, err)
	require.Equal(t, cloud.ImageAvailable, done.Status, done.Metadata)
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, got))
}

// TestImporterOfUploadFails completes an upload at a member that then fails. A repeated call at another member, and
// later the leader, must finish the upload.
func TestImporterOfUploadFails(t *testing.T) {
	w := newWorld(t, 3)
	failed, other := w.member(1), w.member(2)
	w.run(other)
	w.run(w.member(3))
	complete := func() (UploadRef, string) {
		u := begin(t, failed, described(""))
		data := noise(2000)
		_, err := failed.UploadPart(member(t), u, 1, data)
		require.NoError(t, err)
		// Member 1 records that the session is complete, and then fails: the test does not start Run of member 1.
		_, err = completeUploadCommand.Call(member(t), failed.opts.Commands, completeRequest{u, 1})
		require.NoError(t, err)
		return u, sumOf(data)
	}
	u, sum := complete()
	done, err := other.CompleteUpload(member(t), u)
	require.NoError(t, err)
	require.Equal(t, cloud.ImageAvailable, done.Status)
	require.Equal(t, sum, done.SHA256)

	u, sum = complete()
	require.NoError(t, other.Settle(t.Context()))
	w.pass(takeOverTime + time.Second)
	require.NoError(t, other.Settle(t.Context()))
	require.Equal(t, sum, w.settled(u.Image).SHA256)
}

// TestUploadExpires checks that an upload that is not completed in time becomes ERROR, and that its parts are deleted.
func TestUploadExpires(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	u := begin(t, s, described(""))
	_, err := s.UploadPart(member(t), u, 1, noise(1000))
	require.NoError(t, err)
	w.pass(uploadTime - time.Second)
	w.age(1)
	require.NoError(t, s.Settle(t.Context()))
	require.NoError(t, s.sweep(t.Context()))
	require.Len(t, w.kept(1), 1, "the session has not expired yet")
	w.pass(2 * time.Second)
	_, err = s.UploadPart(member(t), u, 2, noise(1000))
	require.ErrorContains(t, err, "expired")
	require.NoError(t, s.Settle(t.Context()))
	require.NoError(t, s.sweep(t.Context()))
	require.Empty(t, w.kept(1), "the expired session keeps space")
	requireNoParts(t, w)
	i, err := s.Get(t.Context(), "acme", u.Image)
	require.NoError(t, err)
	require.Equal(t, cloud.ImageError, i.Status)
	require.Equal(t, "the upload was not completed within 24 hours", i.Metadata[cloud.ImageReason])
}

// TestAbort checks that AbortUpload frees the quota of an upload and deletes its parts, and that Delete does the same.
func TestAbort(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	one := uint64(1)
	_, err := w.records.Update(t.Context(), func(tx *store.Tx) error {
		return tenant.SetOrgQuota(tx, "acme", tenant.Quota{Images: &one})
	})
	require.NoError(t, err)
	for _, end := range []func(UploadRef) error{
		func(u UploadRef) error { return abort(t, s, u) },
		func(u UploadRef) error { return s.Delete(member(t), "acme", u.Image, [32]byte{}) },
	} {
		u := begin(t, s, described(""))
		_, err := s.UploadPart(member(t), u, 1, noise(1000))
		require.NoError(t, err)
		_, err = s.BeginUpload(member(t), described(""), [32]byte{})
		require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
		require.NoError(t, end(u))
		_, err = s.UploadPart(member(t), u, 2, noise(1000))
		require.True(t, fault.Is(err, fault.NotFound), "%v", err)
		w.age(1)
		require.NoError(t, s.Settle(t.Context()))
		require.NoError(t, s.sweep(t.Context()))
		require.Empty(t, w.kept(1))
		requireNoParts(t, w)
	}
	ctx := as(t, "acme", "key", cloud.ProjectMember)
	made, err := s.BeginUpload(ctx, described(""), [32]byte{1})
	require.NoError(t, err)
	again, err := s.BeginUpload(ctx, described(""), [32]byte{1})
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, made.Image.Upload.ID, again.Image.Upload.ID)
}

// TestUploadRefusals checks the errors of calls that cannot succeed. They must change nothing.
func TestUploadRefusals(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	u := begin(t, s, described(""))
	part := func(u UploadRef, n uint32, body []byte) error {
		_, err := s.UploadPart(member(t), u, n, body)
		return err
	}
	small := []byte("x")
	other := u
	other.Session = "other"
	foreign := u
	foreign.Org = "rival"
	for _, c := range []struct {
		name string
		err  error
		kind fault.Kind
		says string
	}{
		{"part 0", part(u, 0, small), fault.InvalidArgument, "1 to 10000"},
		{"part 10001", part(u, 10001, small), fault.InvalidArgument, "1 to 10000"},
		{"no bytes", part(u, 1, nil), fault.InvalidArgument, "body"},
		{"too many bytes", part(u, 1, make([]byte, maxPartBytes+1)), fault.InvalidArgument, "body"},
		{"another session", part(other, 1, small), fault.NotFound, "no upload session"},
		{"another org", part(foreign, 1, small), fault.NotFound, "no image"},
		{"no session", part(UploadRef{"acme", u.Image, ""}, 1, small), fault.InvalidArgument, "upload_session_id"},
		{"an ID that is none", part(UploadRef{"acme", "x", "y"}, 1, small), fault.InvalidArgument, "image_id"},
		{"abort by another org", abort(t, s, foreign), fault.NotFound, "no image"},
	} {
		require.True(t, fault.Is(c.err, c.kind), "%s: %v", c.name, c.err)
		require.ErrorContains(t, c.err, c.says, c.name)
	}
	require.Empty(t, w.kept(1))
	complete := func() error { _, err := s.CompleteUpload(member(t), u); return err }
	require.ErrorContains(t, complete(), "no part was uploaded")
	require.NoError(t, part(u, 1, make([]byte, MinPartBytes)))
	require.NoError(t, part(u, 3, small))
	require.ErrorContains(t, complete(), "part 2 is missing")
	require.NoError(t, part(u, 2, small))
	require.ErrorContains(t, complete(), "part 2 has 1 bytes")
	require.True(t, fault.Is(complete(), fault.FailedPrecondition))
	require.NoError(t, part(u, 2, make([]byte, MinPartBytes)), "replaces the part")
	w.run(s)
	require.NoError(t, complete())
	require.ErrorContains(t, abort(t, s, u), "delete image")
}

// TestUploadIsExamined checks that an uploaded image is examined as an imported one is: a QCOW2 image with a backing
// file is refused even if its header is in one part and the name of the backing file in another.
func TestUploadIsExamined(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	w.run(s)
	attack := blank(t, func(b []byte) {
		binary.BigEndian.PutUint64(b[8:], MinPartBytes)
		binary.BigEndian.PutUint32(b[16:], uint32(len("/etc/shadow")))
	})
	attack = append(attack, make([]byte, MinPartBytes-len(attack)%MinPartBytes)...)
	attack = append(attack[:MinPartBytes], "/etc/shadow"...)
	for name, c := range map[string]struct {
		data     []byte
		metadata map[string]string
		says     string
	}{
		"backing file":   {attack, nil, "backing"},
		"VMDK":           {append([]byte("KDMV"), noise(1000)...), nil, "disk image refused"},
		"other checksum": {noise(1000), map[string]string{cloud.SourceSHA256: sumOf(nil)}, "its SHA-256 is"},
	} {
		i := described("")
		i.Metadata = c.metadata
		u := begin(t, s, i)
		for n, p := range cut(c.data, MinPartBytes) {
			_, err := s.UploadPart(member(t), u, uint32(n+1), p)
			require.NoError(t, err, name)
		}
		done, err := s.CompleteUpload(member(t), u)
		require.NoError(t, err, name)
		require.Equal(t, cloud.ImageError, done.Status, name)
		require.Contains(t, done.Metadata[cloud.ImageReason], c.says, name)
		require.Empty(t, done.SHA256)
	}
	require.NoError(t, s.Settle(t.Context()))
	requireNoParts(t, w)
}

// TestSweepNeedsNewestRecords checks that a member that cannot read the newest records removes no files.
func TestSweepNeedsNewestRecords(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	require.NoError(t, s.opts.Files.StorePart(t.Context(), sumOf([]byte("x")), bytes.NewReader([]byte("x"))))
	w.age(1)
	ended, end := context.WithCancel(t.Context())
	end()
	require.Error(t, s.sweep(ended))
	require.Len(t, w.kept(1), 1)
}

// TestOpenUploadsAreLimited checks the limit of open uploads of an org.
func TestOpenUploadsAreLimited(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	var last UploadRef
	for n := range maxUploads {
		i := described("")
		i.Name = fmt.Sprintf("image-%d", n)
		last = begin(t, s, i)
	}
	_, err := s.BeginUpload(member(t), described(""), [32]byte{})
	require.ErrorContains(t, err, "complete or abort")
	require.NoError(t, abort(t, s, last))
	begin(t, s, described(""))
}

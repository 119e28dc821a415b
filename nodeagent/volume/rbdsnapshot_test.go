package volume

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
	"github.com/trivet-cloud/trivet/shared/rbddiff"
)

// snapshots returns the names of the RBD snapshots of a volume, as rbd(8) lists them.
func (l *rbdLab) snapshots(n int) string {
	l.Helper()
	return l.ceph.Run("rbd", "snap", "ls", "--all", rbdtest.Pool+"/"+volumeImage(id(n)))
}

// take takes a complete snapshot of a volume with the attachment a.
func (l *rbdLab) take(host *RBDPool, of SnapshotRef, a Attachment) {
	l.Helper()
	s, err := host.BeginSnapshot(l.Context(), of, a)
	require.NoError(l, err)
	require.NoError(l, s.Take(l.Context()))
	require.NoError(l, s.Finish(l.Context(), time.UnixMilli(7), "crash"))
}

// export reads a snapshot from host, and writes its ranges to disk, from the offset at.
func (l *rbdLab) export(host *RBDPool, e Export, disk []byte) (ranges int) {
	l.Helper()
	var stream bytes.Buffer
	e.Scanned = func() error { return nil }
	require.NoError(l, host.ExportSnapshot(l.Context(), e, &stream))
	d, err := rbddiff.NewReader(&stream)
	require.NoError(l, err)
	require.Equal(l, rbddiff.Header{From: e.Since, To: e.Snapshot.ID, Size: uint64(len(disk))}, d.Header())
	for ; ; ranges++ {
		r, err := d.Next()
		if err == io.EOF {
			return ranges
		}
		require.NoError(l, err)
		require.GreaterOrEqual(l, r.Offset, e.Offset)
		if clear(disk[r.Offset : r.Offset+r.Length]); r.Data != nil {
			copy(disk[r.Offset:], r.Data)
		}
	}
}

// TestRBDSnapshots takes snapshots of a volume while a process writes to it, on one host, and uses them on another host:
// for new volumes and for exports.
func TestRBDSnapshots(t *testing.T) {
	l := newRBDLab(t)
	a, b := l.host(nil), l.host(nil)
	ctx, at := t.Context(), Attachment{VM: "one", Generation: 1}
	require.NoError(t, a.Create(ctx, Volume{ID: id(1), Size: 8 * mib}))
	_, err := a.Open(ctx, id(1), at)
	require.NoError(t, err)
	w := l.writer(volumeImage(id(1)))
	w.do("write -P 1 0 1M", "wrote")
	w.do("write -P 1 4M 1M", "wrote")
	require.NoError(t, a.Confirm(ctx, id(1), at))
	first, second := ref(1, 5), ref(1, 6)
	s, err := a.BeginSnapshot(ctx, first, at)
	require.NoError(t, err)
	require.True(t, s.Attached())
	require.EqualValues(t, 8*mib, s.Size())
	_, err = b.BeginSnapshot(ctx, first, at)
	require.ErrorIs(t, err, ErrRefused, "the snapshot is being taken")
	require.NoError(t, s.Take(ctx))
	w.do("write -P 2 0 1M", "wrote")
	w.do("write -z -u 4M 1M", "wrote")
	require.NoError(t, s.Finish(ctx, time.UnixMilli(7), "crash"))
	have, err := b.Snapshot(ctx, first)
	require.NoError(t, err)
	require.Equal(t, []any{Complete, uint64(8 * mib), int64(7), "crash"}, []any{have.State, have.Size, have.TakenAt, have.Consistency})

	_, err = b.BeginSnapshot(ctx, second, Attachment{VM: "one"})
	require.ErrorIs(t, err, ErrStale, "a snapshot for an earlier attachment")
	_, err = b.BeginSnapshot(ctx, second, Attachment{Generation: 1})
	require.ErrorIs(t, err, ErrInUse, "the volume was detached, and is not flushed")
	l.take(a, second, at)

	full := make([]byte, 8*mib)
	require.Equal(t, 32, l.export(b, Export{Snapshot: first}, full), "ranges of 64 KiB, without zeros")
	require.Equal(t, []byte{1, 1, 0, 1, 0}, []byte{full[0], full[mib-1], full[mib], full[4*mib], full[5*mib]})
	l.export(b, Export{Snapshot: second, Since: first.ID}, full)
	require.True(t, bytes.Equal(l.content(id(1)), full), "the differences change the first snapshot into the second one")
	tail := make([]byte, 8*mib)
	require.Equal(t, 15, l.export(b, Export{Snapshot: second, Offset: 100_000}, tail))
	require.Equal(t, []byte{0, 2}, []byte{tail[99_999], tail[100_000]})

	source := first
	require.NoError(t, b.Create(ctx, Volume{ID: id(2), Size: 16 * mib, Source: &source}))
	status, err := a.Status(ctx, id(2))
	require.NoError(t, err)
	require.Equal(t, []any{true, uint64(16 * mib), ""}, []any{status.Clone, status.Size, status.Error})
	require.ErrorIs(t, a.DeleteSnapshot(ctx, first), ErrInUse, "the new volume shares content with it")
	require.NoError(t, a.Flatten(ctx, id(2), nil))
	require.NoError(t, a.Flatten(ctx, id(2), nil), "a repeated call")
	status, err = b.Status(ctx, id(2))
	require.NoError(t, err)
	require.Equal(t, []any{false, false}, []any{status.Clone, status.Flattened})
	for range 2 {
		require.NoError(t, a.DeleteSnapshot(ctx, first))
	}
	_, err = b.Snapshot(ctx, first)
	require.ErrorIs(t, err, ErrNoSnapshot)
	require.ErrorIs(t, b.Create(ctx, Volume{ID: id(3), Size: 16 * mib, Source: &source}), ErrNoSnapshot)
	content := l.content(id(2))
	require.Len(t, content, 16*mib)
	require.Equal(t, []byte{1, 0, 1, 0}, []byte{content[0], content[mib], content[4*mib], content[8*mib]})

	w.do("quit", "")
	_ = w.cmd.Wait()
	require.NoError(t, a.Detach(ctx, id(1), 1))
	s, err = b.BeginSnapshot(ctx, ref(1, 7), Attachment{Generation: 1})
	require.NoError(t, err)
	require.NoError(t, s.Take(ctx))
	require.NoError(t, s.CheckOpened(ctx))
	require.False(t, s.Attached())
	_, err = a.Open(ctx, id(1), Attachment{VM: "two", Generation: 2})
	require.NoError(t, err)
	require.NoError(t, s.CheckOpened(ctx))
	require.True(t, s.Attached(), "a VM has opened the volume while the snapshot was taken")
	require.NoError(t, a.Detach(ctx, id(1), 2))
	l.ceph.Run("rbd", "snap", "create", "--no-progress", rbdtest.Pool+"/"+volumeImage(id(1))+"@mine")
	require.Error(t, a.Delete(ctx, id(1)), "a snapshot that an operator has made")
	require.NotContains(t, l.snapshots(1), second.ID)
	l.ceph.Run("rbd", "snap", "rm", "--no-progress", rbdtest.Pool+"/"+volumeImage(id(1))+"@mine")
	require.NoError(t, a.Delete(ctx, id(1)))
	require.Equal(t, volumeImage(id(2)), strings.TrimSpace(l.ceph.Run("rbd", "ls", rbdtest.Pool)))
	require.NoError(t, a.DeleteSnapshot(ctx, second), "the volume is deleted")
}

// TestRBDSnapshotOfLostHost lets a host record a snapshot as failed that another host is taking. The other host must not
// record it as complete, and must leave no RBD snapshot.
func TestRBDSnapshotOfLostHost(t *testing.T) {
	l := newRBDLab(t)
	a, b := l.host(nil), l.host(nil)
	ctx := t.Context()
	require.NoError(t, a.Create(ctx, Volume{ID: id(1), Size: mib}))
	of := ref(1, 5)
	for _, end := range []func() error{
		func() error { return b.FailSnapshot(ctx, of, "interrupted") },
		func() error { return b.DeleteSnapshot(ctx, of) },
	} {
		s, err := a.BeginSnapshot(ctx, of, Attachment{})
		require.NoError(t, err)
		require.False(t, s.Attached())
		require.NoError(t, end())
		require.NoError(t, s.Take(ctx))
		require.ErrorIs(t, s.Finish(ctx, time.UnixMilli(7), "detached"), ErrRefused, "a failed snapshot became complete")
		require.Empty(t, l.snapshots(1))
		require.NoError(t, b.DeleteSnapshot(ctx, of))
	}
	// The volume moves to a VM of host b while host a takes a snapshot for the VM that had it.
	one, two := Attachment{VM: "one", Generation: 1}, Attachment{VM: "two", Generation: 2}
	_, err := a.Open(ctx, id(1), one)
	require.NoError(t, err)
	s, err := a.BeginSnapshot(ctx, of, one)
	require.NoError(t, err)
	require.NoError(t, b.Detach(ctx, id(1), 1))
	_, err = b.Open(ctx, id(1), two)
	require.NoError(t, err)
	require.NoError(t, s.Take(ctx))
	require.ErrorIs(t, s.Finish(ctx, time.UnixMilli(7), "file-system"), ErrStale, "a snapshot of an ended attachment became complete")
	require.Empty(t, l.snapshots(1))
	require.NoError(t, s.Abandon(ctx))
	require.NoError(t, b.Detach(ctx, id(1), 2))

	require.NoError(t, b.FailSnapshot(ctx, of, "too late"))
	have, err := a.Snapshot(ctx, of)
	require.NoError(t, err)
	require.Equal(t, []any{Failed, "too late"}, []any{have.State, have.Error})
	_, err = a.BeginSnapshot(ctx, of, Attachment{Generation: 2})
	require.ErrorIs(t, err, ErrRefused, "a failed snapshot is not taken again")
	require.ErrorIs(t, a.Create(ctx, Volume{ID: id(2), Size: mib, Source: &of}), ErrRefused)
	l.take(a, ref(1, 6), Attachment{Generation: 2})
	require.NoError(t, b.FailSnapshot(ctx, ref(1, 6), "late"))
	have, err = b.Snapshot(ctx, ref(1, 6))
	require.NoError(t, err)
	require.Equal(t, Complete, have.State)
	l.ceph.Run("rbd", "snap", "unprotect", rbdtest.Pool+"/"+volumeImage(id(1))+"@"+l.only(1))
	l.ceph.Run("rbd", "snap", "rm", "--no-progress", rbdtest.Pool+"/"+volumeImage(id(1))+"@"+l.only(1))
	_, err = b.Snapshot(ctx, ref(1, 6))
	require.ErrorIs(t, err, ErrRefused, "the RBD snapshot is missing")
}

// only returns the name of the only RBD snapshot of a volume.
func (l *rbdLab) only(n int) string {
	l.Helper()
	for _, word := range strings.Fields(l.snapshots(n)) {
		if strings.HasPrefix(word, "snapshot-") {
			return word
		}
	}
	require.Fail(l, "the volume has no RBD snapshot")
	return ""
}

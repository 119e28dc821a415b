package volume

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/shared/rbddiff"
)

// export returns the stream of an export.
func (h *host) export(e Export) []byte {
	h.Helper()
	if e.Scanned == nil {
		e.Scanned = func() error { return nil }
	}
	var b bytes.Buffer
	require.NoError(h, h.ExportSnapshot(h.Context(), e, &b))
	return b.Bytes()
}

// apply applies a stream to the content of a disk, and returns the new content.
func apply(t *testing.T, disk, stream []byte) []byte {
	t.Helper()
	d, err := rbddiff.NewReader(bytes.NewReader(stream))
	require.NoError(t, err)
	out := make([]byte, d.Header().Size)
	copy(out, disk)
	for {
		r, err := d.Next()
		if err == io.EOF {
			return out
		}
		require.NoError(t, err)
		if r.Data == nil {
			clear(out[r.Offset : r.Offset+r.Length])
		}
		copy(out[r.Offset:], r.Data)
	}
}

func ranges(t *testing.T, stream []byte) (out []rbddiff.Range) {
	t.Helper()
	d, err := rbddiff.NewReader(bytes.NewReader(stream))
	require.NoError(t, err)
	for {
		r, err := d.Next()
		if err == io.EOF {
			return out
		}
		require.NoError(t, err)
		out = append(out, r)
	}
}

// TestExportOfRawVolume changes a volume at random, makes a snapshot after each change, and compares the content of
// each snapshot with its full export, and with the exports of the changes since all older snapshots.
func TestExportOfRawVolume(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	h.make(Volume{ID: id(1), Size: 4 * mib})
	random := rand.New(rand.NewPCG(1, 2))
	var contents [][]byte
	size := 4 * mib
	for n := range 6 {
		if n == 4 { // the volume grows
			size = 6 * mib
			require.NoError(t, h.Resize(t.Context(), id(1), uint64(size)))
		}
		for range 8 {
			pattern := byte(random.IntN(3)) // 0 writes zeros
			length := 1 + random.IntN(300<<10)
			h.writeTo(1, pattern, int64(random.IntN(size-length)), length)
		}
		data, err := os.ReadFile(h.rawFile(1))
		require.NoError(t, err)
		contents = append(contents, data)
		h.snapshot(ref(1, 10+n), time.Now())
	}
	for n, want := range contents {
		stream := h.export(Export{Snapshot: ref(1, 10+n)})
		require.True(t, bytes.Equal(want, apply(t, nil, stream)), "full export of snapshot %d", n)
		for _, r := range ranges(t, stream) {
			require.NotNil(t, r.Data, "a full export has no ranges of zeros")
		}
		for older := range n {
			stream := h.export(Export{Snapshot: ref(1, 10+n), Since: id(10 + older)})
			require.True(t, bytes.Equal(want, apply(t, contents[older], stream)), "export of snapshot %d since %d", n, older)
		}
	}
}

// TestExportContinues continues an export at the end of each of its ranges, and within them.
func TestExportContinues(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	h.make(Volume{ID: id(1), Size: mib})
	h.writeTo(1, 'a', 100<<10, 200<<10)
	h.writeTo(1, 'b', 700<<10, 10<<10)
	h.snapshot(ref(1, 2), time.Now())
	whole, err := os.ReadFile(h.rawFile(1))
	require.NoError(t, err)
	for _, r := range ranges(t, h.export(Export{Snapshot: ref(1, 2)})) {
		for _, offset := range []uint64{r.Offset + r.Length, r.Offset + r.Length/2, r.Offset + 1} {
			stream := h.export(Export{Snapshot: ref(1, 2), Offset: offset})
			start := bytes.Clone(whole)
			clear(start[offset:])
			require.True(t, bytes.Equal(whole, apply(t, start, stream)), "from offset %d", offset)
			for _, later := range ranges(t, stream) {
				require.GreaterOrEqual(t, later.Offset, offset)
			}
		}
	}
}

// TestExportOfOverlay exports snapshots of a volume that was made from an image.
func TestExportOfOverlay(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	h.make(Volume{ID: id(1), Size: 4 * mib, Image: &h.image})
	first := make([]byte, 4*mib)
	copy(first, imageContent)
	h.snapshot(ref(1, 2), time.Now())
	h.qemuIO(id(1), changes...)
	h.snapshot(ref(1, 3), time.Now())
	require.True(t, bytes.Equal(first, apply(t, nil, h.export(Export{Snapshot: ref(1, 2)}))))
	require.True(t, bytes.Equal(guestView(), apply(t, nil, h.export(Export{Snapshot: ref(1, 3)}))))
	since := h.export(Export{Snapshot: ref(1, 3), Since: id(2)})
	require.True(t, bytes.Equal(guestView(), apply(t, first, since)))
	require.Less(t, len(since), mib, "unchanged parts of the image are left out")
}

// TestExportIsRefused checks the errors about snapshots that cannot be exported, and that an error of the caller ends
// an export.
func TestExportIsRefused(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	h.make(Volume{ID: id(1), Size: 64 * mib})
	h.writeTo(1, 'a', 0, 40*mib)
	none := func() error { return nil }
	err := h.ExportSnapshot(t.Context(), Export{Snapshot: ref(1, 2), Scanned: none}, io.Discard)
	require.ErrorIs(t, err, ErrNoSnapshot)
	c, err := h.BeginSnapshot(t.Context(), ref(1, 2), nil)
	require.NoError(t, err)
	err = h.ExportSnapshot(t.Context(), Export{Snapshot: ref(1, 2), Scanned: none}, io.Discard)
	require.ErrorIs(t, err, ErrRefused, "the snapshot is not complete")
	require.NoError(t, c.Copy(t.Context()))
	require.NoError(t, c.Finish(t.Context(), time.Now(), "detached"))
	err = h.ExportSnapshot(t.Context(), Export{Snapshot: ref(1, 2), Since: id(3), Scanned: none}, io.Discard)
	require.ErrorIs(t, err, ErrNoSnapshot)
	require.ErrorContains(t, err, "older snapshot "+id(3))
	end := errors.New("the reader has gone")
	err = h.ExportSnapshot(t.Context(), Export{Snapshot: ref(1, 2), Scanned: func() error { return end }}, io.Discard)
	require.ErrorIs(t, err, end)
}

// TestExportReportsWhileItFetchesTheImage checks that Export.Scanned is called while the host fetches the image of a
// snapshot, and that its error ends the fetch.
func TestExportReportsWhileItFetchesTheImage(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	h.make(Volume{ID: id(1), Size: 4 * mib, Image: &h.image})
	h.snapshot(ref(1, 2), time.Now())
	proceed, ended := make(chan struct{}), make(chan struct{}, 1)
	images, err := disk.OpenImages(t.TempDir(), func(ctx context.Context, _ string, offset int64) (io.ReadCloser, error) {
		select {
		case <-proceed:
			return io.NopCloser(bytes.NewReader(h.content[offset:])), nil
		case <-ctx.Done():
			ended <- struct{}{}
			return nil, ctx.Err()
		}
	})
	require.NoError(t, err)
	t.Cleanup(images.Close)
	h.o.Images = images
	require.NoError(t, h.again())
	gone := errors.New("the reader has gone")
	err = h.ExportSnapshot(t.Context(), Export{Snapshot: ref(1, 2), Scanned: func() error { return gone }}, io.Discard)
	require.ErrorIs(t, err, gone)
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		t.Fatal("the fetch has not ended")
	}
	calls := 0
	stream := h.export(Export{Snapshot: ref(1, 2), Scanned: func() error {
		if calls++; calls == 2 {
			close(proceed)
		}
		return nil
	}})
	require.True(t, bytes.Equal(imageContent, apply(t, nil, stream)[:mib]))
}

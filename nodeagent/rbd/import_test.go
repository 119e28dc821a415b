package rbd_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/nodeagent/rbd"
	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

func testImportAndExport(l *lab) {
	data := make([]byte, 40*mib) // mostly zeros
	copy(data[5*mib:], bytes.Repeat([]byte{1}, mib))
	copy(data[33*mib+7:], "the end")
	require.NoError(l, l.importBytes("x", 64*mib, data[:33*mib+14]))
	image := l.get("x")
	require.EqualValues(l, 64*mib, image.GetSize())
	require.LessOrEqual(l, image.GetUsedBytes(), uint64(8*mib), "zeros take no space")
	l.snapshot("x", "one")
	l.ceph.Run("qemu-io", "-f", "raw", "-c", "write -P 0x5a 8M 64k", "-c", "discard 4M 4M", l.qemuName("x"))
	l.snapshot("x", "two")

	got, sent := l.export("x", "one", "", make([]byte, 64*mib))
	require.Equal(l, sha256.Sum256(append(data, make([]byte, 24*mib)...)), sha256.Sum256(got))
	require.LessOrEqual(l, sent, 8*mib)
	// The difference, applied to the old bytes, gives the new bytes.
	got, sent = l.export("x", "two", "one", got)
	want := append(data, make([]byte, 24*mib)...)
	copy(want[8*mib:], bytes.Repeat([]byte{0x5a}, 64<<10))
	clear(want[4*mib : 8*mib])
	require.Equal(l, sha256.Sum256(want), sha256.Sum256(got))
	require.LessOrEqual(l, sent, 128<<10)

	stream, err := l.client.ExportImage(l.bounded(), &rbdv1.ExportImageRequest{Snapshot: snapshot("x", "three")})
	require.NoError(l, err)
	_, err = stream.Recv()
	requireCode(l.T, codes.NotFound, "open snapshot three", err)
	for _, s := range []string{"one", "two"} {
		_, err := l.client.RemoveSnapshot(l.Context(), &rbdv1.RemoveSnapshotRequest{Name: snapshot("x", s)})
		require.NoError(l, err)
	}
	l.remove("x")
}

// testExportOfLargeImage exports an image that trivet-rbd compares in several parts: the content crosses the limits of
// these parts, at multiples of 4 GiB from the offset of the export.
func testExportOfLargeImage(l *lab) {
	const gib = 1 << 30
	require.NoError(l, l.importBytes("large", 9*gib, []byte("begin")))
	l.snapshot("large", "one")
	l.ceph.Run("qemu-io", "-f", "raw", "-c", "write -P 1 4095M 2M", "-c", "write -P 2 8204M 1M", l.qemuName("large"))
	l.snapshot("large", "two")
	for _, c := range []struct {
		from       string
		offset     uint64
		ones, twos int // bytes with these values
		begin      string
	}{
		{"", 0, 2 * mib, mib, "begin"},
		{"one", 0, 2 * mib, mib, ""},
		{"", 4, 2 * mib, mib, "begin"},
		{"", 4 * mib, 2 * mib, mib, ""},
		{"", 4096 * mib, mib, mib, ""},
		{"one", 4097 * mib, 0, mib, ""},
		{"", 8205 * mib, 0, 0, ""},
	} {
		stream, err := l.client.ExportImage(l.bounded(), &rbdv1.ExportImageRequest{
			Snapshot: snapshot("large", "two"), FromSnapshot: c.from, Offset: c.offset,
		})
		require.NoError(l, err)
		begin, ones, twos, end := "", 0, 0, uint64(0)
		for {
			e, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(l, err)
			require.GreaterOrEqual(l, e.GetOffset(), end, "the extents are sorted: %+v", c)
			end = e.GetOffset() + max(uint64(len(e.GetData())), e.GetZeros())
			require.Greater(l, end, c.offset, "%+v", c)
			ones += bytes.Count(e.GetData(), []byte{1})
			twos += bytes.Count(e.GetData(), []byte{2})
			if e.GetOffset() == 0 {
				begin = string(bytes.TrimRight(e.GetData(), "\x00"))
			}
		}
		require.Equal(l, []any{c.ones, c.twos, c.begin}, []any{ones, twos, begin}, "%+v", c)
	}
	for _, s := range []string{"one", "two"} {
		_, err := l.client.RemoveSnapshot(l.Context(), &rbdv1.RemoveSnapshotRequest{Name: snapshot("large", s)})
		require.NoError(l, err)
	}
	l.remove("large")
}

func testInterruptedImport(l *lab) {
	failure := errors.New("the disk is broken")
	err := rbd.Import(l.bounded(), l.client, name("y"), 16*mib, io.MultiReader(bytes.NewReader(bytes.Repeat([]byte{7}, 6*mib)),
		failingReader{failure}))
	require.ErrorIs(l, err, failure)
	require.NotContains(l, l.images(), "y")
	requireCode(l.T, codes.InvalidArgument, "within the image's", l.importBytes("y", mib, bytes.Repeat([]byte{7}, 2*mib)))
	require.NotContains(l, l.images(), "y")

	// The helper is killed while it waits for more bytes.
	r, w := io.Pipe()
	result := make(chan error, 1)
	ctx := l.bounded()
	go func() {
		defer r.Close() // ends the writes below
		result <- rbd.Import(ctx, l.client, name("y"), 16*mib, r)
	}()
	_, err = w.Write(bytes.Repeat([]byte{7}, 5*mib))
	require.NoError(l, err)
	require.Eventually(l, func() bool { // the image of the import before has another size
		image, err := l.client.GetImage(l.Context(), &rbdv1.GetImageRequest{Name: name("y.partial"), Usage: true})
		return err == nil && image.GetSize() == 16*mib && image.GetUsedBytes() > 0
	}, time.Minute, 10*time.Millisecond)
	l.kill()
	_, _ = w.Write(bytes.Repeat([]byte{7}, 5*mib))
	_ = w.Close()
	requireCode(l.T, codes.Unavailable, "", <-result)
	require.Equal(l, []string{"y.partial"}, l.images())

	data := bytes.Repeat([]byte{8}, 6*mib)
	for begin := time.Now(); ; { // the killed helper is a client of the image for some seconds
		if err = l.importBytes("y", 16*mib, data); err == nil {
			break
		}
		l.Log(time.Since(begin), err)
		require.Less(l, time.Since(begin), 2*time.Minute, "%v", err)
		time.Sleep(time.Second)
	}
	require.Equal(l, []string{"y"}, l.images())
	require.Equal(l, data, l.readAll("y")[:len(data)])
	l.remove("y")
}

type failingReader struct{ err error }

func (r failingReader) Read([]byte) (int, error) { return 0, r.err }

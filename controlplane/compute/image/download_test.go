package image

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestDownload downloads an image through a member that has the image and through one that does not, from several
// offsets. It also checks a download from a member that fails halfway.
func TestDownload(t *testing.T) {
	w := newWorld(t, 3)
	one, two, third := w.member(1), w.member(2), w.member(3)
	stop := w.run(one)
	w.run(two)
	data := noise(3*downloadChunk + 77)
	made, err := one.Create(member(t), described(w.write("disk.raw", data)), [32]byte{})
	require.NoError(t, err)
	id := made.Image.ID
	i := w.settled(id)
	require.Equal(t, cloud.ImageAvailable, i.Status)
	stop()
	for _, s := range []*Service{one, third} {
		for _, offset := range []int{0, 1, downloadChunk, len(data) - 1, len(data)} {
			var got bytes.Buffer
			require.NoError(t, s.Download(t.Context(), "acme", id, uint64(offset), func(b []byte) error {
				require.LessOrEqual(t, len(b), downloadChunk)
				got.Write(b)
				return nil
			}))
			require.True(t, bytes.Equal(data[offset:], got.Bytes()), offset)
		}
	}
	discard := func([]byte) error { return nil }
	require.True(t, fault.Is(one.Download(t.Context(), "acme", id, uint64(len(data)+1), discard), fault.OutOfRange))
	require.True(t, fault.Is(one.Download(t.Context(), "rival", id, 0, discard), fault.NotFound))
	gone := errors.New("the client has gone")
	require.ErrorIs(t, one.Download(t.Context(), "acme", id, 0, func([]byte) error { return gone }), gone)

	// The first holder fails halfway, the second one sends the rest.
	m := &fakeHolders{content: data, holders: map[uint64]fakeHolder{
		1: serveThenFail(1000, false, io.ErrClosedPipe), 2: serveAll,
	}}
	third.opts.Peers = m
	var got bytes.Buffer
	require.NoError(t, third.Download(t.Context(), "acme", id, 0, func(b []byte) error { got.Write(b); return nil }))
	require.True(t, bytes.Equal(data, got.Bytes()))
	m.holders = map[uint64]fakeHolder{1: absent, 2: absent}
	require.True(t, fault.Is(third.Download(t.Context(), "acme", id, 0, discard), fault.Unavailable))
}

package image

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// complete records that an upload is complete, with the given member as its importer. Unlike CompleteUpload it does not
// wait.
func complete(t *testing.T, s *Service, u UploadRef, importer uint64) cloud.Image {
	t.Helper()
	i, err := completeUploadCommand.Call(member(t), s.opts.Commands, completeRequest{u, importer})
	require.NoError(t, err)
	return i
}

// TestFormerImporter completes an upload at one member and then at another one, like a client that got no response. The
// record of the image must have the file that the first member has joined. A failure that the first member reports must
// not change the record.
func TestFormerImporter(t *testing.T) {
	w := newWorld(t, 3)
	first, second := w.member(1), w.member(2)
	u := begin(t, first, described(""))
	data := noise(1000)
	_, err := first.UploadPart(member(t), u, 1, data)
	require.NoError(t, err)
	i := complete(t, first, u, 1)
	complete(t, second, u, 2)
	failure := importResult{ID: u.Image, Member: 1, Failure: "no space"}
	_, err = finishImportCommand.Call(t.Context(), first.opts.Commands, failure)
	require.NoError(t, err)
	now, err := first.Get(t.Context(), "acme", u.Image)
	require.NoError(t, err)
	require.Equal(t, cloud.ImagePending, now.Status)

	from, err := first.openParts(t.Context(), &i)
	require.NoError(t, err)
	require.NoError(t, first.importFrom(t.Context(), i, from))
	now, err = first.Get(t.Context(), "acme", u.Image)
	require.NoError(t, err)
	require.Equal(t, cloud.ImageUploading, now.Status)
	require.Equal(t, sumOf(data), now.SHA256)
	require.Equal(t, []uint64{1}, now.Holders)
}

// fixedVHD returns a fixed VHD with the given data.
func fixedVHD(data []byte) []byte {
	footer := make([]byte, 512)
	copy(footer, "conectix")
	binary.BigEndian.PutUint32(footer[12:], 1<<16) // version 1.0
	binary.BigEndian.PutUint64(footer[48:], uint64(len(data)))
	binary.BigEndian.PutUint32(footer[60:], 2) // fixed
	sum := uint32(0)
	for _, b := range footer {
		sum += uint32(b)
	}
	binary.BigEndian.PutUint32(footer[64:], ^sum)
	return append(data, footer...)
}

// TestImporterFailsBeforeMajority uploads images whose importer fails when it is the only member that has the joined
// image. The other members must join the parts again, because every part was acknowledged.
func TestImporterFailsBeforeMajority(t *testing.T) {
	for _, c := range []struct {
		name     string
		data     []byte
		declared cloud.ImageFormat
	}{
		{"raw", noise(MinPartBytes + 1000), cloud.FormatUnspecified},
		{"converted", fixedVHD(noise(MinPartBytes + 1024)), cloud.FormatVHD},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, 3)
			importer := w.member(1)
			others := []*Service{w.member(2), w.member(3)}
			i := described("")
			i.Format = c.declared
			u := begin(t, importer, i)
			for n, part := range cut(c.data, MinPartBytes) {
				_, err := others[0].UploadPart(member(t), u, uint32(n+1), part)
				require.NoError(t, err)
			}
			stop := w.run(importer)
			complete(t, importer, u, 1)
			imported := w.until(u.Image, "imported", func(i *cloud.Image) bool { return i.Status == cloud.ImageUploading })
			stop()
			w.setBroken(1, true)
			require.NoError(t, others[0].Settle(t.Context()))
			require.NoError(t, w.records.Local(func(v *store.View) error {
				left, _, err := parts.List(v, 0)
				require.Len(t, left, 2, "an acknowledged part was deleted")
				return err
			}))
			for n, s := range others {
				w.age(uint64(n + 2))
				require.NoError(t, s.sweep(t.Context()))
				w.run(s)
			}
			got := w.settled(u.Image)
			require.Equal(t, cloud.ImageAvailable, got.Status, got.Metadata)
			require.Equal(t, imported.SHA256, got.SHA256)
			require.NoError(t, others[0].Settle(t.Context()))
			requireNoParts(t, w)
		})
	}
}

package image

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

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
	from, err := s.open(member(t), &cloud.Image{Org: "acme", Source: url})
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

// TestImportsOfOneOrg checks that an org with as many imports as permitted does not delay the import of another org,
// and that its next import begins when one of the others has ended.
func TestImportsOfOneOrg(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	w.run(s)
	for range maxImportsOf {
		require.True(t, s.importsOf.take("acme"))
	}
	url := w.write("disk.raw", noise(1000))
	own, err := s.Create(member(t), described(url), [32]byte{})
	require.NoError(t, err)
	i := described(url)
	i.Org = "other"
	other, err := s.Create(admin(t), i, [32]byte{})
	require.NoError(t, err)
	require.Equal(t, cloud.ImageAvailable, w.settled(other.Image.ID).Status)
	now, err := s.Get(t.Context(), "acme", own.Image.ID)
	require.NoError(t, err)
	require.Equal(t, cloud.ImagePending, now.Status)

	s.importsOf.give("acme")
	s.wakeUp()
	require.Equal(t, cloud.ImageAvailable, w.settled(own.Image.ID).Status)
}

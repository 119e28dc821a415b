package image

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestUniqueNames checks that an org cannot have two images with one name, by an import, an upload or a new name, unless
// one of them is in the status ERROR.
func TestUniqueNames(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	url := w.write("disk.raw", noise(1000))
	image := func(org cloud.OrgID, name string) cloud.Image { return cloud.Image{Name: name, Org: org, Source: url} }
	first, err := s.Create(member(t), image("acme", "debian"), [32]byte{})
	require.NoError(t, err)
	other, err := s.Create(member(t), image("acme", "alpine"), [32]byte{})
	require.NoError(t, err)
	_, err = s.BeginUpload(admin(t), cloud.Image{Name: "debian", Org: "other"}, [32]byte{})
	require.NoError(t, err, "names are unique within an org")
	_, created := s.Create(member(t), image("acme", "debian"), [32]byte{})
	_, uploaded := s.BeginUpload(member(t), cloud.Image{Name: "debian", Org: "acme"}, [32]byte{})
	_, renamed := s.Update(member(t), "acme", other.Image.ID, "debian", 0, nil)
	for _, err := range []error{created, uploaded, renamed} {
		require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)
		require.ErrorContains(t, err, "org acme has an image called debian")
	}
	// A deleted and a renamed image release their names.
	_, err = s.Update(member(t), "acme", first.Image.ID, "debian-12", 0, nil)
	require.NoError(t, err)
	_, err = s.Update(member(t), "acme", other.Image.ID, "debian", 0, nil)
	require.NoError(t, err)
	require.NoError(t, s.Delete(member(t), "acme", first.Image.ID, [32]byte{}))
	_, err = s.BeginUpload(member(t), cloud.Image{Name: "debian-12", Org: "acme"}, [32]byte{})
	require.NoError(t, err)
	// An import that failed can be repeated under its name, which then means the new image.
	w.change(other.Image.ID, func(i *cloud.Image) { i.Status = cloud.ImageError })
	again, err := s.Create(member(t), image("acme", "debian"), [32]byte{})
	require.NoError(t, err)
	id, err := s.named(member(t), "acme", "debian")
	require.NoError(t, err)
	require.Equal(t, string(again.Image.ID), id)
}

// TestNamesOfEarlierVersions checks images with one name that an earlier version accepted, without an entry in the table
// of names: no third one is accepted, each of them is usable by its ID, and can be renamed and deleted.
func TestNamesOfEarlierVersions(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	var ids []cloud.ImageID
	for range 2 {
		made, err := s.Create(member(t), described(w.write("disk.raw", noise(1000))), [32]byte{})
		require.NoError(t, err)
		w.change(made.Image.ID, func(i *cloud.Image) { i.Name = "debian" })
		ids = append(ids, made.Image.ID)
	}
	_, err := s.BeginUpload(member(t), cloud.Image{Name: "debian", Org: "acme"}, [32]byte{})
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)
	_, err = s.named(member(t), "acme", "debian")
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
	_, err = s.Get(t.Context(), "acme", ids[0])
	require.NoError(t, err)
	_, err = s.Update(member(t), "acme", ids[0], "", 0, map[string]string{"note": "x"})
	require.NoError(t, err)
	_, err = s.Update(member(t), "acme", ids[0], "debian-2", 0, nil)
	require.NoError(t, err)
	require.NoError(t, s.Delete(member(t), "acme", ids[1], [32]byte{}))
	_, err = s.BeginUpload(member(t), cloud.Image{Name: "debian", Org: "acme"}, [32]byte{})
	require.NoError(t, err)
}

// TestConcurrentCallsForOneName checks that only one of several concurrent calls gets a name.
func TestConcurrentCallsForOneName(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	var made sync.Map
	var wait sync.WaitGroup
	for n := range 8 {
		wait.Go(func() {
			if out, err := s.BeginUpload(member(t), cloud.Image{Name: "debian", Org: "acme"}, [32]byte{byte(n)}); err == nil {
				made.Store(out.Image.ID, true)
			}
		})
	}
	wait.Wait()
	count := 0
	made.Range(func(any, any) bool { count++; return true })
	require.Equal(t, 1, count)
}

// TestUnknownKeysOfEarlierVersions checks that an unknown key with the reserved prefix, which an image has from another
// version, can be changed and removed, and that no other one can be added.
func TestUnknownKeysOfEarlierVersions(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	made, err := s.Create(member(t), described(w.write("disk.raw", noise(1000))), [32]byte{})
	require.NoError(t, err)
	w.change(made.Image.ID, func(i *cloud.Image) { i.Metadata = map[string]string{"trivet/old": "1"} })
	update := func(key, value string) error {
		_, err := s.Update(member(t), "acme", made.Image.ID, "", 0, map[string]string{key: value})
		return err
	}
	require.NoError(t, update("trivet/old", "2"))
	require.NoError(t, update("note", "x"))
	require.True(t, fault.Is(update("trivet/new", "1"), fault.InvalidArgument))
	require.NoError(t, update("trivet/old", ""))
	require.True(t, fault.Is(update("trivet/old", "3"), fault.InvalidArgument), "a removed key is unknown")
}

// change changes the record of an image.
func (w *world) change(id cloud.ImageID, change func(*cloud.Image)) {
	w.t.Helper()
	_, err := w.records.Update(w.t.Context(), func(tx *store.Tx) error {
		i, err := Images.Get(tx, string(id))
		if err != nil {
			return err
		}
		change(i)
		Images.Put(tx, i, string(id))
		return nil
	})
	require.NoError(w.t, err)
}

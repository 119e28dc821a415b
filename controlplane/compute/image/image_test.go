package image

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestCreateIsIdempotent repeats CreateImage under an idempotency key. It must return the first response, also on
// another member and after the source was removed.
func TestCreateIsIdempotent(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	url := w.write("disk.raw", noise(1000))
	ctx := as(t, "acme", "key-1", cloud.ProjectMember)
	first, err := s.Create(ctx, described(url), [32]byte{1})
	require.NoError(t, err)
	require.False(t, first.Replayed)
	require.NoError(t, os.Remove(strings.TrimPrefix(url, "file://")))

	again, err := s.Create(ctx, described(url), [32]byte{1})
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, first.Image, again.Image)
	again, err = w.member(2).Create(ctx, described(url), [32]byte{1})
	require.NoError(t, err)
	require.Equal(t, first.Image, again.Image)
	_, err = s.Create(ctx, described(url), [32]byte{2})
	require.True(t, fault.Is(err, fault.InvalidArgument), "another body: %v", err)
	for _, key := range []string{"", "key-2"} {
		_, err = s.Create(as(t, "acme", key, cloud.ProjectMember), described(url), [32]byte{1})
		require.True(t, fault.Is(err, fault.NotFound), "key %q: %v", key, err)
	}
	list, _, err := s.List(member(t), "acme", true, 0, "")
	require.NoError(t, err)
	require.Len(t, list, 1)
}

func TestUsedImageIsNotDeleted(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	w.run(s)
	i := described(w.write("disk.raw", noise(1000)))
	i.Visibility = cloud.Public
	made, err := s.Create(admin(t), i, [32]byte{})
	require.NoError(t, err)
	id := w.settled(made.Image.ID).ID
	use := func(org cloud.OrgID, vm cloud.VMID) {
		_, err := w.records.Update(t.Context(), func(tx *store.Tx) error {
			u, err := Lookup(tx, org, id)
			if err != nil {
				return err
			}
			u.Use(tx, vm)
			return nil
		})
		require.NoError(t, err)
	}
	use("acme", "vm-own")
	use("other", "vm-other")
	err = s.Delete(member(t), "acme", id, [32]byte{})
	require.True(t, fault.Is(err, fault.FailedPrecondition))
	require.ErrorContains(t, err, "used by VM vm-own, others")
	require.NotContains(t, err.Error(), "vm-other", "the VMs of another org must not be named")
	for _, vm := range []cloud.VMID{"vm-own", "vm-other"} {
		_, err = w.records.Update(t.Context(), func(tx *store.Tx) error { Release(tx, id, vm); return nil })
		require.NoError(t, err)
	}
	require.NoError(t, s.Delete(member(t), "acme", id, [32]byte{}))
	_, err = s.Get(t.Context(), "acme", id)
	require.True(t, fault.Is(err, fault.NotFound))
	err = s.Delete(member(t), "acme", id, [32]byte{})
	require.True(t, fault.Is(err, fault.NotFound))

	// A repeated Delete under the same idempotency key must return the same response.
	made, err = s.Create(member(t), described(w.write("disk.raw", noise(1000))), [32]byte{})
	require.NoError(t, err)
	for range 2 {
		require.NoError(t, s.Delete(as(t, "acme", "key", cloud.ProjectMember), "acme", made.Image.ID, [32]byte{7}))
	}
}

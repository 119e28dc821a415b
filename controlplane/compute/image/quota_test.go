package image

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
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

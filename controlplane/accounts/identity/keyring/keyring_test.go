package keyring

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const life = 720 * time.Hour

func uses(r *Ring) map[Use]int {
	n := map[Use]int{}
	for _, k := range r.Keys {
		n[k.Use]++
	}
	return n
}

// TestKeyLifeCycle checks that a key is staged for at least MaxAge, then primary, then secondary, and deleted when the
// last token that it signed has expired.
func TestKeyLifeCycle(t *testing.T) {
	key := clusterkey.Generate()
	var now cloud.Time = 1_800_000_000_000
	r, err := New(key, now)
	require.NoError(t, err)
	require.Equal(t, map[Use]int{Primary: 1, Staged: 1}, uses(r))
	first, next := r.Of(Primary).ID, r.Of(Staged).ID

	err = r.Rotate(key, now+MaxAge.Milliseconds()-1, life, false)
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
	require.Equal(t, first, r.Of(Primary).ID)
	now += MaxAge.Milliseconds()
	require.NoError(t, r.Rotate(key, now, life, false))
	require.Equal(t, next, r.Of(Primary).ID)
	require.Equal(t, Secondary, r.Find(first).Use)
	require.Equal(t, map[Use]int{Primary: 1, Staged: 1, Secondary: 1}, uses(r))
	require.Len(t, r.Published().Keys, 3)

	changed, err := r.Tend(key, now+life.Milliseconds()-1, life)
	require.NoError(t, err)
	require.False(t, changed, "the first key must be kept while a token that it signed can be valid")
	changed, err = r.Tend(key, now+life.Milliseconds(), life)
	require.NoError(t, err)
	require.True(t, changed)
	require.Nil(t, r.Find(first))
	now += RotateAfter.Milliseconds()
	changed, err = r.Tend(key, now, life)
	require.NoError(t, err)
	require.True(t, changed, "Tend must rotate keys when RotateAfter has passed")
	require.Equal(t, Secondary, r.Find(next).Use)
}

// TestRevoke checks that a revoked key is removed from the ring at once, and that the staged key replaces a revoked
// primary.
func TestRevoke(t *testing.T) {
	key := clusterkey.Generate()
	r, err := New(key, 1)
	require.NoError(t, err)
	first, next := r.Of(Primary).ID, r.Of(Staged).ID
	require.NoError(t, r.Revoke(key, first, 2))
	require.Nil(t, r.Find(first))
	require.Equal(t, next, r.Of(Primary).ID)
	require.NotNil(t, r.Of(Staged))
	staged := r.Of(Staged).ID
	require.NoError(t, r.Revoke(key, staged, 3))
	require.NotEqual(t, staged, r.Of(Staged).ID)
	require.True(t, fault.Is(r.Revoke(key, first, 4), fault.NotFound))
	require.Equal(t, map[Use]int{Primary: 1, Staged: 1}, uses(r))
}

// TestRingIsBounded checks that Rotate returns ResourceExhausted when the ring has maxSecondaries secondary keys.
func TestRingIsBounded(t *testing.T) {
	key := clusterkey.Generate()
	r, err := New(key, 1)
	require.NoError(t, err)
	for {
		if err = r.Rotate(key, 2, life, true); err != nil {
			break
		}
	}
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.Len(t, r.Keys, maxSecondaries+2)
}

// TestPrivateKeysAreSealed checks that the published keys contain no private part, and that the stored private keys can
// be decrypted only with the cluster key.
func TestPrivateKeysAreSealed(t *testing.T) {
	key := clusterkey.Generate()
	r, err := New(key, 1)
	require.NoError(t, err)
	private, err := r.Keys[0].Private(key)
	require.NoError(t, err)
	require.EqualValues(t, r.Keys[0].Public, private.Public())
	require.NotContains(t, string(r.Keys[0].Sealed), string(private.Seed()))
	_, err = r.Keys[0].Private(clusterkey.Generate())
	require.ErrorContains(t, err, "another cluster key")
	for _, k := range r.Published().Keys {
		require.True(t, k.IsPublic())
		require.True(t, k.Valid())
	}
}

func TestPossible(t *testing.T) {
	for id, ok := range map[string]bool{"0011223344556677": true, "": false, "host": false, "00112233445566": false, "001122334455667z": false} {
		require.Equal(t, ok, Possible(id), id)
	}
}

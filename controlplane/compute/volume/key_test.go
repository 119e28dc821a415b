package volume

import (
	"bytes"
	"encoding/hex"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// newEncryptedWorld returns a world with the encrypted storage class secret.
func newEncryptedWorld(t testing.TB) *world {
	w := newWorld(t)
	_, err := w.classes.Create(w.as(acme, ""), cloud.StorageClass{
		Name: "secret", Driver: cloud.DriverManaged, Pool: "local", Encrypted: true,
	}, "", [32]byte{})
	require.NoError(t, err)
	return w
}

func (w *world) createSecret(name string) *cloud.Volume {
	w.t.Helper()
	out, err := w.volumes.Create(w.as(acme, "key-"+name), acme, cloud.Volume{Name: name, SizeGiB: 1, Class: "secret"}, "", [32]byte{1})
	require.NoError(w.t, err)
	return &out.Volume
}

// storedKeys returns the records of all keys of volumes.
func (w *world) storedKeys() (out []store.Record[sealedKey]) {
	w.t.Helper()
	require.NoError(w.t, w.Store.Local(func(v *store.View) (err error) {
		out, _, err = keys.List(v, 0)
		return err
	}))
	return out
}

// TestVolumeKey checks when the host of an encrypted volume gets the volume's key: while the volume is attached, and
// until the host has made the volume.
func TestVolumeKey(t *testing.T) {
	w := newEncryptedWorld(t)
	host := w.host("h1", 10)
	v := w.createSecret("data")
	require.Equal(t, []any{true, cloud.VolumeQCOW2}, []any{v.Encrypted, v.Format})
	other := w.createSecret("more")
	require.NoError(t, w.attach(v.ID, vmA, host))
	sent := w.assigned(host)[0]
	require.True(t, sent.Encrypted)
	require.Regexp(t, "^[0-9a-f]{64}$", string(sent.EncryptionKey))
	key := sent.EncryptionKey
	require.NoError(t, w.attach(other.ID, vmA, host))
	for _, o := range w.assigned(host) {
		if o.VolumeId == string(other.ID) {
			require.NotEqual(t, key, o.EncryptionKey, "each volume has a key of its own")
		}
	}

	w.release(v.ID, vmA)
	require.Equal(t, key, w.assigned(host)[0].EncryptionKey, "the host has not made the volume yet")
	w.report(host, cloud.VolumeObservation{Volume: v.ID, Generation: w.get(v.ID).Generation, Present: true, FlushedGeneration: 1})
	require.Empty(t, w.assigned(host)[0].EncryptionKey, "the host of a detached volume must not get its key")
	require.NoError(t, w.attach(v.ID, vmB, host))
	require.Equal(t, key, w.assigned(host)[0].EncryptionKey)
}

// TestKeyIsDeletedWithVolume checks that the key of a volume is sealed, also in everything that members write to their
// disks, and that its record is deleted with the volume.
func TestKeyIsDeletedWithVolume(t *testing.T) {
	w := newEncryptedWorld(t)
	var mu sync.Mutex
	var log []byte
	w.Quorum.Proposed = func(data []byte) {
		mu.Lock()
		defer mu.Unlock()
		log = append(log, data...)
	}
	plain := w.create("plain", 1)
	require.False(t, plain.Encrypted)
	require.Empty(t, w.storedKeys())
	v := w.createSecret("data")
	w.createSecret("data") // a repeat under the idempotency key
	stored := w.storedKeys()
	require.Len(t, stored, 1)
	_, err := clusterkey.Generate().Open(sealedName(v.ID), stored[0].Value.Sealed)
	require.Error(t, err, "only the cluster key opens the key")
	_, err = w.volumes.keys.cluster.Open(sealedName("another"), stored[0].Value.Sealed)
	require.Error(t, err, "the key is bound to its volume")
	host := w.host("h1", 10)
	require.NoError(t, w.attach(v.ID, vmA, host))
	key := w.assigned(host)[0].EncryptionKey
	w.release(v.ID, vmA)
	w.report(host, cloud.VolumeObservation{Volume: v.ID, Generation: w.get(v.ID).Generation, Present: true, FlushedGeneration: 1})
	raw, err := hex.DecodeString(string(key))
	require.NoError(t, err)
	mu.Lock()
	require.True(t, bytes.Contains(log, stored[0].Value.Sealed), "the test must see what members write")
	require.False(t, bytes.Contains(log, key) || bytes.Contains(log, raw), "the raft log has the key in plain text")
	mu.Unlock()
	_, err = w.volumes.Delete(w.as(acme, ""), acme, v.ID, [32]byte{})
	require.NoError(t, err)
	require.Empty(t, w.storedKeys(), "the key of a deleted volume must be deleted")
}

// TestHostWithoutEncryption checks that an encrypted volume is not attached on a host whose agent cannot encrypt, and
// that such a host does not serve encrypted classes.
func TestHostWithoutEncryption(t *testing.T) {
	w := newEncryptedWorld(t)
	old := w.AddHost("old", cloud.Capacity{VCPUs: 8, MemoryMiB: 8192, StorageGiB: 100}, func(n *cloud.Node) {
		n.StoragePools = []cloud.StoragePool{{Name: "local", AllocatableGiB: 10}}
	})
	v := w.createSecret("data")
	require.ErrorContains(t, w.attach(v.ID, vmA, old), "cannot encrypt volumes in the storage pool local")
	require.NoError(t, w.Store.Local(func(r *store.View) error {
		p, err := PlacementOf(r, acme, []cloud.VolumeID{v.ID})
		require.NoError(t, err)
		require.Contains(t, p.Shortage(w.Node(old)), "cannot encrypt")
		for encrypts, want := range map[bool][]string{false: {"local"}, true: {"local", "secret"}} {
			served, err := w.volumes.ServedClasses(r, &cloud.Node{StoragePools: []cloud.StoragePool{{Name: "local", Encryption: encrypts}}})
			require.NoError(t, err)
			require.Equal(t, want, served)
		}
		return nil
	}))
	require.NoError(t, w.attach(v.ID, vmA, w.host("new", 10)))
}

// TestKeysOfSnapshots makes a snapshot of an encrypted volume, and another volume from the snapshot. The first volume's
// key must be kept while the snapshot needs it. The second volume must have the same key, also after the snapshot and
// the first volume were deleted, and its host must get the key only while the volume is attached.
func TestKeysOfSnapshots(t *testing.T) {
	w := newEncryptedWorld(t)
	host := w.host("h1", 10)
	v := w.createSecret("data")
	require.NoError(t, w.attach(v.ID, vmA, host))
	key := w.assigned(host)[0].EncryptionKey
	w.release(v.ID, vmA)
	s := w.snapshot(v.ID, "one")
	report := func(state cloud.SnapshotState) {
		w.report(host, cloud.VolumeObservation{
			Volume: v.ID, Generation: w.get(v.ID).Generation, Present: true, FlushedGeneration: 1,
			Snapshots: []cloud.SnapshotObservation{{Snapshot: s, State: state, TakenAt: 1000, Format: cloud.VolumeQCOW2}},
		})
	}
	report(cloud.SnapshotComplete)
	_, err := w.volumes.Delete(w.as(acme, ""), acme, v.ID, [32]byte{})
	require.ErrorContains(t, err, "delete them first", "the snapshot needs the key")
	require.Len(t, w.storedKeys(), 1)

	restored := cloud.Volume{ID: cloud.VolumeID(uuid.NewString()), Name: "copy"}
	w.Update(func(tx *store.Tx) error { return w.volumes.CreateFrom(tx, acme, &restored, s) })
	require.Equal(t, []any{true, "secret", cloud.VolumeQCOW2}, []any{restored.Encrypted, restored.Class, restored.Format})
	sent := func() *agentv1.AssignedVolume {
		for _, o := range w.assigned(host) {
			if o.VolumeId == string(restored.ID) {
				return o
			}
		}
		return nil
	}
	require.True(t, sent().Encrypted)
	require.Empty(t, sent().EncryptionKey, "the host that copies a snapshot must not get its key")
	w.report(host, cloud.VolumeObservation{Volume: restored.ID, Generation: 1, Present: true})
	w.Update(func(tx *store.Tx) error {
		_, err := DropSnapshot(tx, acme, s)
		return err
	})
	report(cloud.SnapshotAbsent)
	_, err = w.volumes.Delete(w.as(acme, ""), acme, v.ID, [32]byte{})
	require.NoError(t, err)
	stored := w.storedKeys()
	require.Len(t, stored, 1, "the key of the deleted volume must be deleted")
	_, err = w.volumes.keys.cluster.Open(sealedName(v.ID), stored[0].Value.Sealed)
	require.Error(t, err, "the key is bound to the volume that was made from the snapshot")
	require.Empty(t, sent().EncryptionKey, "the host of a detached volume must not get its key")
	require.NoError(t, w.attach(restored.ID, vmB, host))
	require.Equal(t, key, sent().EncryptionKey, "the content of a snapshot cannot be read with another key")
	w.release(restored.ID, vmB)
	require.Empty(t, sent().EncryptionKey, "the host of a detached volume must not get its key")
}

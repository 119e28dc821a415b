package volume

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// sealedKey is the record of the key of an encrypted volume.
type sealedKey struct {
	// Sealed is the key, encrypted with the cluster key.
	Sealed []byte
}

// keys is the table of the keys of encrypted volumes, at volume-key/<project>/<id>.
var keys = store.NewTable[sealedKey]("volume-key")

// keyBytes is the size of a volume's key, before its encoding.
const keyBytes = 32

// sealer makes and opens the keys of volumes.
type sealer struct{ cluster *clusterkey.Key }

// sealedName returns the name for which clusterkey seals the key of a volume. A key that was sealed for one volume
// cannot be opened for another volume.
func sealedName(id cloud.VolumeID) string { return "volume/" + string(id) }

// make returns a new random key for a volume, sealed with the cluster key. The key is the text of 64 hexadecimal
// digits, because QEMU accepts only text.
func (s sealer) make(id cloud.VolumeID) sealedKey {
	var key [keyBytes]byte
	rand.Read(key[:])
	return sealedKey{s.cluster.Seal(sealedName(id), []byte(hex.EncodeToString(key[:])))}
}

// keyFor returns the key of a volume if the volume's host needs the key, and nil otherwise. The host needs the key
// while the volume is attached, to open the volume. The host also needs the key to make the volume, until it has
// reported the volume as present. The host makes a volume from a snapshot without the key, because it copies the
// encrypted bytes of the snapshot.
func (s sealer) keyFor(r store.Reader, v *cloud.Volume) ([]byte, error) {
	needed := v.VM != "" || !v.Present && v.Source == nil
	if !v.Encrypted || !needed && !mutant.On(mutant.SendKeyToAll) {
		return nil, nil
	}
	return s.open(r, v)
}

// copyKey stores the key of the volume from as the key of the volume to, which is made from a snapshot of from. The
// bytes of a snapshot are encrypted with the key of the snapshot's volume. Each volume has a key record of its own, so
// the volume to stays readable after from was deleted. A snapshot needs no key record, because a volume that has
// snapshots cannot be deleted.
func (s sealer) copyKey(tx *store.Tx, from, to *cloud.Volume) error {
	key, err := s.open(tx, from)
	if err != nil {
		return err
	}
	if mutant.On(mutant.NewKeyForCopy) {
		made := s.make(to.ID)
		keys.Put(tx, &made, string(to.Project), string(to.ID))
		return nil
	}
	keys.Put(tx, &sealedKey{s.cluster.Seal(sealedName(to.ID), key)}, string(to.Project), string(to.ID))
	return nil
}

// open returns the key of an encrypted volume.
func (s sealer) open(r store.Reader, v *cloud.Volume) ([]byte, error) {
	k, err := keys.Get(r, string(v.Project), string(v.ID))
	if err != nil {
		return nil, err
	}
	if k == nil {
		return nil, fmt.Errorf("volume %s has no key", v.ID)
	}
	return s.cluster.Open(sealedName(v.ID), k.Sealed)
}

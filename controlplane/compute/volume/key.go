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
// while the volume is attached, to open the volume. The host also needs the key until it has reported the volume as
// present, to make the volume.
func (s sealer) keyFor(r store.Reader, v *cloud.Volume) ([]byte, error) {
	if !v.Encrypted || v.VM == "" && v.Present && !mutant.On(mutant.SendKeyToAll) {
		return nil, nil
	}
	k, err := keys.Get(r, string(v.Project), string(v.ID))
	if err != nil {
		return nil, err
	}
	if k == nil {
		return nil, fmt.Errorf("volume %s has no key", v.ID)
	}
	return s.cluster.Open(sealedName(v.ID), k.Sealed)
}

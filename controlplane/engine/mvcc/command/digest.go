package command

import (
	"crypto/sha256"
	"encoding/binary"
)

// DigestBytes is the size of what DigestKeys returns.
const DigestBytes = sha256.Size

// DigestKeys stands for keys, given in order, in a StepRevoke: that of LeaseKeys for the lease to have these keys and no
// others when the step is carried out.
func DigestKeys(keys [][]byte) []byte {
	h := sha256.New()
	var length [8]byte
	for _, key := range keys {
		binary.BigEndian.PutUint64(length[:], uint64(len(key)))
		h.Write(length[:])
		h.Write(key)
	}
	return h.Sum(nil)
}

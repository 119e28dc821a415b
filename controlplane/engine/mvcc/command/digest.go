package command

import (
	"crypto/sha256"
	"encoding/binary"
)

// DigestBytes is the length, in bytes, of what DigestKeys returns.
const DigestBytes = sha256.Size

// DigestKeys returns a SHA-256 digest of keys, which must be sorted. A StepRevoke with this digest as its Value is
// refused unless the lease has exactly these keys when it is applied.
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

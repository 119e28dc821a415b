package mvcc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/cockroachdb/pebble/v2"
)

// Hash is a checksum over the keyspace up to a revision. Members that hash the same revisions get the same, whatever they
// have scrubbed.
type Hash struct {
	Hash     uint32
	Revision int64 // up to which it was computed
	Current  int64 // the current revision then
	Floor    int64 // the floor then: hashes with different floors cannot be compared; 0: nothing was compacted
}

// HashKV hashes keys, values and revisions as etcd's HashKV does, not to the same number: of each key the versions up to
// revision, 0 being the current one, that are newer than the floor, and the one that can be read at the floor. It reads
// everything, and fails with ErrFutureRevision, a CompactedError or what ctx says.
func (e *Engine) HashKV(ctx context.Context, revision int64) (Hash, error) {
	s := e.Snapshot()
	defer s.Close()
	if err := s.acquire(); err != nil {
		return Hash{}, fmt.Errorf("hash: %w", err)
	}
	defer s.gen.release()
	revision, err := s.readable(revision)
	if err != nil {
		return Hash{}, fmt.Errorf("hash: %w", err)
	}
	h := Hash{Revision: revision, Current: s.revision, Floor: s.floor}
	if h.Hash, err = hashVersions(ctx, s.gen.db, s.floor, revision); err != nil {
		return Hash{}, fmt.Errorf("hash up to revision %d: %w", revision, marked(err))
	}
	return h, nil
}

func hashVersions(ctx context.Context, db *pebble.DB, floor, revision int64) (sum uint32, err error) {
	it, err := db.NewIter(&pebble.IterOptions{LowerBound: []byte{tableKeys}, UpperBound: []byte{tableKeys + 1}})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	const between = 1024 // versions between two looks at ctx
	table := crc32.MakeTable(crc32.Castagnoli)
	var length [8]byte
	for ok, n := it.First(), 0; ok; n++ {
		if n%between == 0 && ctx.Err() != nil {
			return 0, ctx.Err()
		}
		_, mod, err := splitVersion(it.Key())
		if err != nil {
			return 0, err
		}
		value, err := it.ValueAndErr()
		if err != nil {
			return 0, err
		}
		tombstone := len(value) == 1 && value[0] == recordTombstone
		if mod <= revision && (mod > floor || !tombstone) {
			sum = crc32.Update(sum, table, it.Key())
			binary.BigEndian.PutUint64(length[:], uint64(len(value)))
			sum = crc32.Update(sum, table, length[:])
			sum = crc32.Update(sum, table, value)
		}
		if mod <= floor {
			// What is older Scrub may have removed or not.
			ok = it.NextPrefix()
		} else {
			ok = it.Next()
		}
	}
	return sum, it.Error()
}

package mvcc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"time"

	"github.com/cockroachdb/pebble/v2"
)

// Hash is a checksum over the keyspace up to a revision. Members that hash the same revisions get the same, whatever they
// have scrubbed.
type Hash struct {
	Hash            uint32
	Revision        int64 // up to which it was computed
	Current         int64 // the current revision then
	CompactRevision int64 // the compactRevision then: hashes with different floors cannot be compared; 0: nothing was compacted
}

// HashKV hashes keys, values and revisions as etcd's HashKV does, not to the same number: of each key the versions up to
// revision, 0 being the current one, that are newer than the compactRevision, and the one that can be read at the compactRevision. It reads
// everything, and fails with ErrFutureRevision, a CompactedError or what ctx says.
//
// Of a revision at which the keyspace was compacted it gives the hash that was remembered, if one was, with the compactRevision from
// before: what members found there stays comparable, and stays what it was when it was asked for before the compaction.
func (e *Engine) HashKV(ctx context.Context, revision int64) (Hash, error) {
	s := e.Snapshot()
	defer s.Close()
	if s.err != nil {
		return Hash{}, fmt.Errorf("hash: %w", s.err)
	}
	if h, ok := s.gen.hashes.at(revision); ok {
		h.Current = s.revision
		return h, nil
	}
	revision, err := s.readable(revision)
	if err != nil {
		return Hash{}, fmt.Errorf("hash: %w", err)
	}
	h := Hash{Revision: revision, Current: s.revision, CompactRevision: s.compactRevision}
	if h.Hash, err = s.gen.hash(ctx, s.compactRevision, revision, 0); err != nil {
		return Hash{}, fmt.Errorf("hash up to revision %d: %w", revision, markCorrupt(err))
	}
	return h, nil
}

// hash hashes the versions up to a revision that the compactRevision, which the caller has pinned, leaves. It lets go of g from time
// to time, so that what closes it need not wait, and rests then for so many times as long as it has worked.
func (g *generation) hash(ctx context.Context, compactRevision, revision int64, rest time.Duration) (uint32, error) {
	h := hasher{compactRevision: compactRevision, revision: revision, next: []byte{tableKeys}}
	for h.next != nil {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		if err := g.acquire(); err != nil {
			return 0, err
		}
		began := time.Now()
		err := h.hashStep(g.db)
		g.release()
		if err != nil {
			return 0, err
		}
		if rest > 0 && h.next != nil {
			select {
			case <-time.After(rest * time.Since(began)):
			case <-g.done:
			case <-ctx.Done():
			}
		}
	}
	return h.sum, nil
}

// hasher is a hash that is being computed.
type hasher struct {
	compactRevision, revision int64
	sum                       uint32
	next                      []byte // where it goes on; nil: it is done
}

// hashVersions and hashBytes of values are hashed at most between two looks at whether to go on.
const (
	hashVersions = 4096
	hashBytes    = 1 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// some hashes the next versions.
func (h *hasher) hashStep(db *pebble.DB) (err error) {
	it, err := db.NewIter(&pebble.IterOptions{LowerBound: h.next, UpperBound: []byte{tableKeys + 1}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	var length [8]byte
	h.next = nil
	size := 0
	for ok, n := it.First(), 0; ok; n++ {
		if n == hashVersions || size >= hashBytes {
			h.next = bytes.Clone(it.Key())
			return nil
		}
		_, mod, err := splitVersion(it.Key())
		if err != nil {
			return err
		}
		value, err := it.ValueAndErr()
		if err != nil {
			return err
		}
		size += len(value)
		tombstone := len(value) == 1 && value[0] == recordTombstone
		if mod <= h.revision && (mod > h.compactRevision || !tombstone) {
			h.sum = crc32.Update(h.sum, castagnoli, it.Key())
			binary.BigEndian.PutUint64(length[:], uint64(len(value)))
			h.sum = crc32.Update(h.sum, castagnoli, length[:])
			h.sum = crc32.Update(h.sum, castagnoli, value)
		}
		if mod <= h.compactRevision {
			// What is older Scrub may have removed or not.
			ok = it.NextPrefix()
		} else {
			ok = it.Next()
		}
	}
	return it.Error()
}

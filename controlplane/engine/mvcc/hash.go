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

// Hash is a checksum of the keyspace up to a revision. It is the same on all members, even if Scrub has removed more
// versions on some of them.
type Hash struct {
	Hash     uint32
	Revision int64 // newest revision whose versions are hashed
	Current  int64 // current revision at the compaction, or when HashKV was called

	// CompactRevision is the compact revision at the time when the hash was computed; 0 means that nothing was
	// compacted. Hashes with different compact revisions cannot be compared.
	CompactRevision int64
}

// HashKV hashes keys, values and revisions like etcd's HashKV, but with a different result. It hashes the versions up
// to revision (0: the current one) that are newer than the compact revision, and of each key the one that is readable
// at the compact revision. It reads the whole keyspace. It fails with ErrFutureRevision, a CompactedError or the error
// of ctx.
//
// For a revision at which the keyspace was compacted, it returns the hash that was computed then
// (Options.HashOnCompact), if there is one. The field CompactRevision of that hash is the compact revision before the
// compaction. So one member's hash from before the compaction can be compared with another member's from after it.
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

// hash returns the checksum of the versions that HashKV describes. The caller must have pinned compactRevision. hash
// works in steps and releases g between them, so that closing g need not wait until all is hashed. After each step it
// pauses for rest times the duration of the step.
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

// hasher is the state of a hash computation between its steps.
type hasher struct {
	compactRevision, revision int64
	sum                       uint32
	next                      []byte // key at which the next step starts; nil: done
}

// hashVersions is the maximum number of versions that one step of hash reads. hashBytes is the number of bytes of
// values after which a step ends.
const (
	hashVersions = 4096
	hashBytes    = 1 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// hashStep adds the next versions to h.sum, until it has read hashVersions versions or hashBytes bytes.
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
			// Skip the older versions of the key. Scrub may have removed them on some members only, and the hash must
			// be the same on all.
			ok = it.NextPrefix()
		} else {
			ok = it.Next()
		}
	}
	return it.Error()
}

package mvcc

import (
	"context"
	"errors"
	"slices"
	"sync"
)

// remembered are the hashes up to those revisions at which the keyspace was compacted, as it was before. Members compact
// at the same revisions, so these are what can be compared however fast keys change.
type compactionHashes struct {
	computing sync.Mutex // held while a hash is computed

	mu      sync.Mutex
	hashes  []Hash // the oldest first
	running int    // that are computed or wait for their turn
	written int64  // bytes that had ever been written when the last one was begun
}

const (
	// mostRemembered is as in etcd.
	maxRemembered = 10
	// mostHashing bounds what is kept from Scrub for hashes.
	maxRunning = 2
	// hashShare and hashAnyway bound what hashes read: of a keyspace of more than hashAnyway bytes a compaction is hashed
	// once a 1/hashShare of it was written since the last one that was. It depends on nothing in which members differ but
	// when they started.
	hashShare  = 16
	hashAnyway = 16 << 20
	// hashRest is how many times longer than it works a hash rests: nobody waits for it but Scrub, and commands come first.
	hashRest = 4
)

func (r *compactionHashes) at(revision int64) (Hash, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.IndexFunc(r.hashes, func(h Hash) bool { return h.Revision == revision }); i >= 0 {
		return r.hashes[i], true
	}
	return Hash{}, false
}

func (r *compactionHashes) add(h Hash) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hashes = append(r.hashes, h)
	r.hashes = slices.Delete(r.hashes, 0, max(len(r.hashes)-maxRemembered, 0))
}

// begin says whether a compaction is to be hashed. Call end if so.
func (r *compactionHashes) begin(s *state) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running >= maxRunning || s.live > hashAnyway && s.written-r.written < s.live/hashShare {
		return false
	}
	r.running++
	r.written = s.written
	return true
}

func (r *compactionHashes) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running--
}

// remember hashes in the background what v, which is about to be published, makes unreadable by a compaction. Scrub leaves
// it alone until then.
func (e *Engine) hashCompaction(v *view) {
	before, g := e.published.Load(), v.gen
	if !e.opts.HashOnCompact || e.opts.Quiet || before.gen != g || v.compactRevision == before.compactRevision || !g.hashes.begin(&v.state) {
		return
	}
	g.mu.Lock()
	g.pins[before.compactRevision]++
	g.mu.Unlock()
	h := Hash{Revision: v.compactRevision, Current: v.revision, CompactRevision: before.compactRevision}
	e.builders.Go(func() {
		r := &g.hashes
		defer r.end()
		defer g.unpin(h.CompactRevision)
		r.computing.Lock()
		defer r.computing.Unlock()
		var err error
		if h.Hash, err = g.hash(context.Background(), h.CompactRevision, h.Revision, hashRest); err == nil {
			r.add(h)
		} else if !errors.Is(err, ErrClosed) && !errors.Is(err, ErrRestored) {
			e.opts.Logger.Error("mvcc hash before compaction", "dir", e.dir.path, "revision", h.Revision, "err", markCorrupt(err))
		}
	})
}

// Remembered gives the hash that HashKV remembers of a revision at which the keyspace was compacted; ok is false when it
// remembers none. It reads nothing.
func (e *Engine) CompactionHash(revision int64) (h Hash, ok bool) {
	return e.published.Load().gen.hashes.at(revision)
}

// Hashes are the hashes that HashKV remembers of compactions, at most ten, the newest first.
func (e *Engine) CompactionHashes() []Hash {
	r := &e.published.Load().gen.hashes
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Clone(r.hashes)
	slices.Reverse(all)
	return all
}

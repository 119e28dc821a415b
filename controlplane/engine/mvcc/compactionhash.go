package mvcc

import (
	"context"
	"errors"
	"slices"
	"sync"
)

// compactionHashes holds the hashes that were computed because of compactions. Each hash covers the keyspace as it was
// just before the compaction. All members compact at the same revisions, so these hashes can be compared between
// members while keys change.
type compactionHashes struct {
	computing sync.Mutex // held while a hash is computed

	mu      sync.Mutex
	hashes  []Hash // oldest first
	running int    // number of hashes that are being computed or wait to be
	written int64  // value of state.written when the last computation began
}

const (
	// maxRemembered is the number of hashes that are remembered, as in etcd.
	maxRemembered = 10
	// maxRunning is the maximum of compactionHashes.running. It is small because Scrub must keep the data for each of
	// these hashes until it is computed.
	maxRunning = 2
	// hashShare and hashAnyway limit how much is read for hashes. A keyspace of more than hashAnyway bytes is hashed
	// only if at least 1/hashShare of its size was written since the last computation began. All members hash at the
	// same compactions, except after a restart.
	hashShare  = 16
	hashAnyway = 16 << 20
	// hashRest is the duration of the pauses in a computation, in multiples of the time that the step before the pause
	// took. The pauses keep a computation from slowing down commands. A hash is not urgent, since only Scrub waits for
	// it.
	hashRest = 4
)

// at returns the hash that was computed for the compaction at revision, if there is one.
func (r *compactionHashes) at(revision int64) (Hash, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.IndexFunc(r.hashes, func(h Hash) bool { return h.Revision == revision }); i >= 0 {
		return r.hashes[i], true
	}
	return Hash{}, false
}

// add adds h and drops the oldest hashes beyond maxRemembered.
func (r *compactionHashes) add(h Hash) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hashes = append(r.hashes, h)
	r.hashes = slices.Delete(r.hashes, 0, max(len(r.hashes)-maxRemembered, 0))
}

// begin reports whether to compute a hash for the compaction that leads to the state s. If it returns true, the caller
// must call end after the computation.
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

// end must be called after each computation for which begin has returned true.
func (r *compactionHashes) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running--
}

// hashCompaction must be called before the view v is published. If v raises the compact revision and begin allows a
// hash, it starts to hash the keyspace as it was before v, in the background. Scrub keeps the data until the hash is
// computed.
func (e *Engine) hashCompaction(v *view) {
	before, g := e.published.Load(), v.gen
	if !e.opts.HashOnCompact || e.opts.Quiet {
		return
	}
	if before.gen != g || v.compactRevision == before.compactRevision || !g.hashes.begin(&v.state) {
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

// CompactionHash returns the hash that was computed for the compaction at revision; ok is false if there is none. It
// reads nothing from disk.
func (e *Engine) CompactionHash(revision int64) (h Hash, ok bool) {
	return e.published.Load().gen.hashes.at(revision)
}

// CompactionHashes returns the hashes computed for compactions, at most ten, newest first.
func (e *Engine) CompactionHashes() []Hash {
	r := &e.published.Load().gen.hashes
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Clone(r.hashes)
	slices.Reverse(all)
	return all
}

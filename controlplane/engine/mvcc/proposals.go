package mvcc

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// MaxProposals is the maximum number of proposal IDs that are remembered with their results. A command whose ID is
// remembered is not applied again, so the number must be the same on all members.
const MaxProposals = 100_000

// sweepInterval is the number of new proposal IDs between two sweeps. A sweep deletes the stored entries that contain
// only IDs older than the last MaxProposals.
const sweepInterval = 8192

// proposals remembers the last MaxProposals proposal IDs with their results: in memory for look-ups, and in Pebble, in
// one entry for each batch. Members may batch commands differently, but remember the same IDs.
type proposals struct {
	byID   map[[16]byte]uint32 // position in ring
	ring   []proposal          // grows to MaxProposals; then new entries overwrite the oldest
	oldest int                 // position of the oldest entry once ring is full
	next   uint64              // number of IDs ever added, including forgotten ones

	unsaved   []byte // encoded IDs of the batch that is being built
	lastSweep uint64 // value of next at the last deletion of forgotten IDs
}

// proposal is the ID of an applied command and its result.
type proposal struct {
	id     [16]byte
	result command.Result
}

// find returns the result of the proposal id; it returns false if id is not remembered.
func (p *proposals) find(id [16]byte) (command.Result, bool) {
	at, ok := p.byID[id]
	if !ok {
		return command.Result{}, false
	}
	return p.ring[at].result, true
}

// add adds a proposal of the batch that is being built, in memory and to p.unsaved.
func (p *proposals) add(id [16]byte, r command.Result) {
	r.Steps = nil
	p.insert(proposal{id, r})
	p.unsaved = append(p.unsaved, id[:]...)
	p.unsaved = command.EncodeResult(p.unsaved, r)
}

// insert adds n in memory, in place of the oldest proposal if there are MaxProposals.
func (p *proposals) insert(n proposal) {
	at := len(p.ring)
	if at < MaxProposals {
		p.ring = append(p.ring, n)
	} else {
		at = p.oldest
		p.oldest = (p.oldest + 1) % MaxProposals
		delete(p.byID, p.ring[at].id)
		p.ring[at] = n
	}
	p.byID[n.id] = uint32(at)
	p.next++
}

// save adds the IDs that were added since the last save to the batch b. Every sweepInterval IDs, it also deletes old
// entries.
func (p *proposals) save(b *pebble.Batch) error {
	if len(p.unsaved) == 0 {
		return nil
	}
	err := b.Set(proposalsKey(p.next-1), p.unsaved, nil)
	p.unsaved = p.unsaved[:0]
	if err == nil && p.next > MaxProposals && p.next-p.lastSweep >= sweepInterval {
		p.lastSweep = p.next
		err = b.DeleteRange(proposalsKey(0), proposalsKey(p.next-MaxProposals), nil)
	}
	return err
}

// loadProposals reads the last MaxProposals proposal IDs from db. The parameter next is the number of IDs that were
// ever stored.
func loadProposals(db *pebble.DB, next uint64) (p *proposals, err error) {
	p = &proposals{byID: map[[16]byte]uint32{}, lastSweep: next}
	oldest := next - min(next, MaxProposals)
	p.next = oldest
	it, err := db.NewIter(&pebble.IterOptions{
		LowerBound: proposalsKey(oldest), UpperBound: []byte{tableProposals + 1},
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		if cerr := it.Close(); err == nil {
			err = cerr
		}
	}()
	for ok := it.First(); ok; ok = it.Next() {
		value, err := it.ValueAndErr()
		if err != nil {
			return nil, err
		}
		if err := p.load(it.Key(), value, oldest); err != nil {
			return nil, err
		}
	}
	if err := it.Error(); err != nil {
		return nil, err
	}
	if p.next != next {
		return nil, fmt.Errorf("%w: %d proposal IDs, want %d", ErrCorrupt, p.next-oldest, next-oldest)
	}
	return p, nil
}

// load adds the proposals of one stored entry. The key of the entry contains the sequence number of the last ID in the
// entry. IDs whose sequence number is below oldest are ignored.
func (p *proposals) load(key, value []byte, oldest uint64) error {
	d := command.FieldDecoder{Rest: value}
	var found []proposal
	for len(d.Rest) > 0 {
		var n proposal
		copy(n.id[:], d.Take(len(n.id)))
		n.result = d.Result()
		found = append(found, n)
	}
	k := command.FieldDecoder{Rest: key}
	k.Byte()
	last := k.Fixed64()
	if d.Err != nil || k.Err != nil || last+1 < uint64(len(found)) || len(found) == 0 {
		return fmt.Errorf("%w: proposal IDs at %x", ErrCorrupt, key)
	}
	first := last + 1 - uint64(len(found))
	if first < oldest {
		found = found[min(oldest-first, uint64(len(found))):]
		first = oldest
	}
	if first != p.next {
		return fmt.Errorf("%w: proposal ID has number %d, want %d", ErrCorrupt, first, p.next)
	}
	for _, n := range found {
		p.insert(n)
	}
	return nil
}

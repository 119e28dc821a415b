package mvcc

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// MaxProposals is how many ids of proposals are remembered with their results. It is part of the meaning of a command.
const MaxProposals = 100_000

// proposalsSwept is how many ids may be recorded between two removals of forgotten ones.
const sweepInterval = 8192

// proposals remembers the last MaxProposals ids and their results: in memory to look them up, and in Pebble, packed into
// one record a batch. How ids are packed depends on how commands were batched; which ids are known does not.
type proposals struct {
	byID   map[[16]byte]uint32 // place in ring
	ring   []proposal          // grows to MaxProposals, then its oldest entry makes place
	oldest int                 // of the oldest, once ring is full
	next   uint64              // ids ever recorded

	unsaved   []byte // those of the batch being built
	lastSweep uint64 // next, when forgotten records were last removed
}

type proposal struct {
	id     [16]byte
	result command.Result
}

func (p *proposals) find(id [16]byte) (command.Result, bool) {
	at, ok := p.byID[id]
	if !ok {
		return command.Result{}, false
	}
	return p.ring[at].result, true
}

func (p *proposals) add(id [16]byte, r command.Result) {
	r.Steps = nil
	p.insert(proposal{id, r})
	p.unsaved = append(p.unsaved, id[:]...)
	p.unsaved = command.EncodeResult(p.unsaved, r)
}

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

// save adds the ids since the last save to b.
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

// loadProposals reads the ids that are remembered once next were recorded.
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
		return nil, fmt.Errorf("%w: ids of %d proposals, want %d", ErrCorrupt, p.next-oldest, next-oldest)
	}
	return p, nil
}

// load reads one record, whose key tells the number of its last id, and leaves out those before oldest.
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
		return fmt.Errorf("%w: ids of proposals at %x", ErrCorrupt, key)
	}
	first := last + 1 - uint64(len(found))
	if first < oldest {
		found = found[min(oldest-first, uint64(len(found))):]
		first = oldest
	}
	if first != p.next {
		return fmt.Errorf("%w: id %d of a proposal where %d is due", ErrCorrupt, first, p.next)
	}
	for _, n := range found {
		p.insert(n)
	}
	return nil
}

package mvcc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// leases are the leases that commands see, by id, with their TTLs. The goroutine that applies owns them.
type leases map[int64]int64

// LeaseChanges tells what a batch did to the leases.
type LeaseChanges struct {
	All     bool            // the state was replaced: what was known of leases no longer counts
	Granted []command.Lease // in order; one that was also revoked is in both
	Revoked []int64
}

func (c *LeaseChanges) any() bool { return c.All || len(c.Granted)+len(c.Revoked) > 0 }

func leaseKey(table byte, id int64) []byte {
	return binary.BigEndian.AppendUint64([]byte{table}, uint64(id))
}

func attachmentKey(id int64, key []byte) []byte {
	k := make([]byte, 0, 1+8+len(key))
	return append(binary.BigEndian.AppendUint64(append(k, tableAttachments), uint64(id)), key...)
}

// attachedBounds are those of all keys of a lease.
func attachmentBounds(id int64) *pebble.IterOptions {
	o := &pebble.IterOptions{LowerBound: leaseKey(tableAttachments, id), UpperBound: []byte{tableAttachments + 1}}
	if uint64(id) != math.MaxUint64 {
		o.UpperBound = leaseKey(tableAttachments, int64(uint64(id)+1))
	}
	return o
}

func loadLeases(db *pebble.DB) (leases, error) {
	l := leases{}
	err := eachLease(db, func(found command.Lease) { l[found.ID] = found.TTL })
	return l, err
}

func eachLease(db *pebble.DB, visit func(command.Lease)) (err error) {
	it, err := db.NewIter(&pebble.IterOptions{LowerBound: []byte{tableLeases}, UpperBound: []byte{tableLeases + 1}})
	if err != nil {
		return fmt.Errorf("read leases: %w", markCorrupt(err))
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	for ok := it.First(); ok; ok = it.Next() {
		value, err := it.ValueAndErr()
		if err != nil {
			return fmt.Errorf("read leases: %w", markCorrupt(err))
		}
		l, err := decodeLease(it.Key(), value)
		if err != nil {
			return err
		}
		visit(l)
	}
	return markCorrupt(it.Error())
}

func decodeLease(key, value []byte) (command.Lease, error) {
	d := command.FieldDecoder{Rest: key}
	d.Byte()
	id := int64(d.Fixed64())
	ttl, n := binary.Uvarint(value)
	if d.Err != nil || len(d.Rest) > 0 || n != len(value) || int64(ttl) < 0 {
		return command.Lease{}, fmt.Errorf("%w: lease at %x", ErrCorrupt, key)
	}
	return command.Lease{ID: id, TTL: int64(ttl)}, nil
}

// Lease returns lease id; ok is false when there is none. Leases have no history: unlike keys they are as they are now,
// not as they were when the snapshot was taken.
func (s *Snapshot) Lease(id int64) (l command.Lease, ok bool, err error) {
	if err := s.acquire(); err != nil {
		return command.Lease{}, false, err
	}
	defer s.gen.release()
	key := leaseKey(tableLeases, id)
	value, closer, err := s.gen.db.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return command.Lease{}, false, nil
	}
	if err != nil {
		return command.Lease{}, false, fmt.Errorf("read lease: %w", markCorrupt(err))
	}
	l, err = decodeLease(key, value)
	return l, err == nil, errors.Join(err, closer.Close())
}

// Leases returns all leases, as they are now, in the order of their ids, negative ones last.
func (s *Snapshot) Leases() (all []command.Lease, err error) {
	if err := s.acquire(); err != nil {
		return nil, err
	}
	defer s.gen.release()
	err = eachLease(s.gen.db, func(l command.Lease) { all = append(all, l) })
	return all, err
}

// LeaseKeys returns the keys that are attached to lease id, as they are now, in order.
func (s *Snapshot) LeaseKeys(id int64) (keys [][]byte, err error) {
	if err := s.acquire(); err != nil {
		return nil, err
	}
	defer s.gen.release()
	return readLeaseKeys(s.gen.db, id)
}

func readLeaseKeys(db *pebble.DB, id int64) (keys [][]byte, err error) {
	it, err := db.NewIter(attachmentBounds(id))
	if err != nil {
		return nil, fmt.Errorf("read keys of lease: %w", markCorrupt(err))
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	const before = 1 + 8
	for ok := it.First(); ok; ok = it.Next() {
		keys = append(keys, slices.Clone(it.Key()[before:]))
	}
	return keys, markCorrupt(it.Error())
}

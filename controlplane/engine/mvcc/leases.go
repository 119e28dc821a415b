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

// leases maps the IDs of all leases to their TTLs. Only the goroutine that calls Apply uses it.
type leases map[int64]int64

// LeaseChanges lists the leases that a batch granted and revoked.
type LeaseChanges struct {
	All     bool            // Restore replaced the state: all leases may differ
	Granted []command.Lease // in the order of the commands; a lease granted and revoked in the batch is in both lists
	Revoked []int64
}

func (c *LeaseChanges) any() bool { return c.All || len(c.Granted)+len(c.Revoked) > 0 }

// leaseKey returns the Pebble key of the lease id in table. For tableAttachments it returns the common prefix of the
// keys of the lease's attachments.
func leaseKey(table byte, id int64) []byte {
	return binary.BigEndian.AppendUint64([]byte{table}, uint64(id))
}

// attachmentKey returns the Pebble key of key's attachment to a lease.
func attachmentKey(id int64, key []byte) []byte {
	k := make([]byte, 0, 1+8+len(key))
	return append(binary.BigEndian.AppendUint64(append(k, tableAttachments), uint64(id)), key...)
}

// attachmentBounds returns the Pebble bounds of the attachments of keys to a lease.
func attachmentBounds(id int64) *pebble.IterOptions {
	o := &pebble.IterOptions{LowerBound: leaseKey(tableAttachments, id), UpperBound: []byte{tableAttachments + 1}}
	if uint64(id) != math.MaxUint64 {
		o.UpperBound = leaseKey(tableAttachments, int64(uint64(id)+1))
	}
	return o
}

// loadLeases reads all leases.
func loadLeases(db *pebble.DB) (leases, error) {
	l := leases{}
	err := eachLease(db, func(found command.Lease) { l[found.ID] = found.TTL })
	return l, err
}

// eachLease calls visit for each stored lease.
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

// decodeLease decodes a stored lease.
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

// Lease returns the lease with this ID. If the lease does not exist, ok is false. Leases have no history: the result is
// the current lease, whatever the snapshot's revision.
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

// Leases returns all current leases, ordered by ID as an unsigned number.
func (s *Snapshot) Leases() (all []command.Lease, err error) {
	if err := s.acquire(); err != nil {
		return nil, err
	}
	defer s.gen.release()
	err = eachLease(s.gen.db, func(l command.Lease) { all = append(all, l) })
	return all, err
}

// LeaseKeys returns the keys that are currently attached to lease id, in order.
func (s *Snapshot) LeaseKeys(id int64) (keys [][]byte, err error) {
	if err := s.acquire(); err != nil {
		return nil, err
	}
	defer s.gen.release()
	return readLeaseKeys(s.gen.db, id)
}

// readLeaseKeys reads the keys that are attached to a lease, in order.
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

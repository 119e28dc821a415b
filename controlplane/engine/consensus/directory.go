package consensus

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
)

// directory is what a data directory stores about itself.
type directory struct {
	ID      uint64   // the directory's random ID, above 0
	Vouched bool     // whether the other members have accepted the directory, so that the member may vote
	Member  uint64   // the raft ID of the member that the directory belongs to
	Members []uint64 // the first configuration; empty if the member joins an existing cluster
}

// directory reads what putDirectory wrote; found is false in a new data directory.
func (e *engine) directory() (d directory, found bool, err error) {
	v, err := e.get([]byte(keyBirth))
	if v == nil || err != nil {
		return d, false, err
	}
	r := reader{b: v}
	d.ID, d.Vouched, d.Member = r.fixed64(), r.bool(), r.uvarint()
	for range r.uvarint() {
		if r.short {
			break
		}
		d.Members = append(d.Members, r.uvarint())
	}
	if r.short || r.bad || len(r.b) > 0 {
		return d, false, errors.New("the ID of this data directory is unreadable")
	}
	return d, true, nil
}

// putDirectory durably stores d.
func (e *engine) putDirectory(d directory) error {
	v := binary.LittleEndian.AppendUint64(nil, d.ID)
	v = appendBool(v, d.Vouched)
	v = binary.AppendUvarint(v, d.Member)
	v = binary.AppendUvarint(v, uint64(len(d.Members)))
	for _, m := range d.Members {
		v = binary.AppendUvarint(v, m)
	}
	return e.put([]byte(keyBirth), v)
}

// peers returns for each other member the ID of the one data directory that this member accepts messages from.
func (e *engine) peers() (map[uint64]uint64, error) {
	ids := map[uint64]uint64{}
	it, err := e.db.NewIter(&pebble.IterOptions{LowerBound: []byte{keyMember}, UpperBound: []byte{keyMember + 1}})
	if err != nil {
		return nil, fmt.Errorf("read the data directories of other members: %w", err)
	}
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		if key := it.Key(); len(key) == 9 && len(it.Value()) == 8 {
			ids[binary.BigEndian.Uint64(key[1:])] = binary.LittleEndian.Uint64(it.Value())
		}
	}
	return ids, it.Error()
}

// putPeer durably stores that this member accepts messages of another member only from the data directory id.
func (e *engine) putPeer(member, id uint64) error {
	return e.put(memberKey(member), binary.LittleEndian.AppendUint64(nil, id))
}

// put durably stores one key.
func (e *engine) put(key, value []byte) error {
	b := e.newBatch()
	defer b.Close()
	if err := b.Set(key, value, nil); err != nil {
		return err
	}
	return e.commit(b)
}

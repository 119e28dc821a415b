package raftlog

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/internal/codec"
)

// Directory is the identity of a data directory: its ID, and the member that it belongs to. It is stored in the
// directory itself.
type Directory struct {
	ID      uint64   // the directory's random ID, above 0
	Vouched bool     // whether the other members have recorded the directory's ID, so that the member may vote
	Member  uint64   // the raft ID of the member that the directory belongs to
	Members []uint64 // the first configuration; empty if the member joins an existing cluster
}

// Directory returns the identity that PutDirectory has stored. found is false if none is stored yet.
func (e *Engine) Directory() (d Directory, found bool, err error) {
	v, err := e.get([]byte(keyDirectory))
	if v == nil || err != nil {
		return d, false, err
	}
	r := codec.Reader{Rest: v}
	d.ID, d.Vouched, d.Member = r.Fixed64(), r.Bool(), r.Uvarint()
	for range r.Uvarint() {
		if r.Short {
			break
		}
		d.Members = append(d.Members, r.Uvarint())
	}
	if r.Short || r.Malformed || len(r.Rest) > 0 {
		return d, false, errors.New("the ID of this data directory is unreadable")
	}
	return d, true, nil
}

// PutDirectory durably stores d as the identity of the data directory.
func (e *Engine) PutDirectory(d Directory) error {
	v := binary.LittleEndian.AppendUint64(nil, d.ID)
	v = codec.AppendBool(v, d.Vouched)
	v = binary.AppendUvarint(v, d.Member)
	v = binary.AppendUvarint(v, uint64(len(d.Members)))
	for _, m := range d.Members {
		v = binary.AppendUvarint(v, m)
	}
	return e.put([]byte(keyDirectory), v)
}

// PeerDirIDs returns what PutPeerDirID has stored: for each other member, the ID of the only data directory from which
// this member accepts messages.
func (e *Engine) PeerDirIDs() (map[uint64]uint64, error) {
	ids := map[uint64]uint64{}
	it, err := e.db.NewIter(&pebble.IterOptions{LowerBound: []byte{keyPeer}, UpperBound: []byte{keyPeer + 1}})
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

// PutPeerDirID durably stores the ID of another member's data directory. This member accepts messages of that member
// only from this directory.
func (e *Engine) PutPeerDirID(member, id uint64) error {
	return e.put(peerKey(member), binary.LittleEndian.AppendUint64(nil, id))
}

// put durably stores a value under the given key.
func (e *Engine) put(key, value []byte) error {
	b := e.NewBatch()
	defer b.Close()
	if err := b.Set(key, value, nil); err != nil {
		return err
	}
	return e.Commit(b)
}

package mvcc

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// state is everything of the engine that is neither a key nor a proposal's id. It is written with every batch.
type state struct {
	applied         command.Position
	revision        int64  // of the last transaction that changed something; 1 when none did
	compactRevision int64  // oldest revision that can be read
	time            int64  // highest stamp seen, Unix milliseconds
	keys            int64  // live keys
	proposals       uint64 // ids ever recorded
	epoch           int64  // of the named records; from 1
	written         int64  // bytes of all versions ever written, as Size counts them
	live            int64  // bytes of the live versions, as Size counts them
}

// stateFormat is the version of everything in the Pebble keyspace. Format 1 knew no epoch, leases and sizes, and listed
// each revision on its own; all it can hold can be read.
const (
	stateFormat    = 2
	oldStateFormat = 1
)

func appendState(dst []byte, s state) []byte {
	dst = append(dst, stateFormat)
	dst = binary.AppendUvarint(dst, s.applied.Index)
	dst = binary.AppendUvarint(dst, s.applied.Term)
	dst = binary.AppendUvarint(dst, uint64(s.revision))
	dst = binary.AppendUvarint(dst, uint64(s.compactRevision))
	dst = binary.AppendUvarint(dst, uint64(s.time))
	dst = binary.AppendUvarint(dst, uint64(s.keys))
	dst = binary.AppendUvarint(dst, s.proposals)
	dst = binary.AppendUvarint(dst, uint64(s.epoch))
	dst = binary.AppendUvarint(dst, uint64(s.written))
	return binary.AppendUvarint(dst, uint64(s.live))
}

func decodeState(b []byte) (state, error) {
	d := command.FieldDecoder{Rest: b}
	f := d.Byte()
	if d.Err == nil && f != stateFormat && f != oldStateFormat {
		return state{}, fmt.Errorf("state of format %d, this program knows %d: %w", f, stateFormat, command.ErrUnknownFormat)
	}
	s := state{
		applied:  command.Position{Index: d.Uint64(), Term: d.Uint64()},
		revision: d.Int64(), compactRevision: d.Int64(), time: d.Int64(), keys: d.Int64(), proposals: d.Uint64(), epoch: 1,
	}
	if f == stateFormat {
		s.epoch, s.written, s.live = d.Int64(), d.Int64(), d.Int64()
	}
	if d.Err != nil || len(d.Rest) > 0 || s.revision < 1 || s.compactRevision > s.revision || s.epoch < 1 {
		return state{}, fmt.Errorf("%w: state %x", ErrCorrupt, b)
	}
	return s, nil
}

func loadState(db *pebble.DB) (state, error) {
	b, closer, err := db.Get([]byte{tableState})
	if errors.Is(err, pebble.ErrNotFound) {
		return state{revision: 1, epoch: 1}, nil
	}
	if err != nil {
		return state{}, fmt.Errorf("read state: %w", markCorrupt(err))
	}
	s, err := decodeState(b)
	return s, errors.Join(err, closer.Close())
}

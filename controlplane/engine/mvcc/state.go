package mvcc

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// state holds the counters and limits of the keyspace. Each batch stores it in Pebble together with its changes.
type state struct {
	applied         command.Position
	revision        int64  // of the last command that changed a key; 1: there was none
	compactRevision int64  // oldest revision that can be read; 0: nothing was compacted
	time            int64  // highest time stamp, Unix milliseconds
	keys            int64  // number of live keys
	proposals       uint64 // number of proposal IDs ever stored, including forgotten ones
	epoch           int64  // 1, and 1 more for each program that changed named records
	written         int64  // size of all versions ever written, counted as by Size
	live            int64  // size of the live versions, counted as by Size
}

// stateFormat is the format of the whole Pebble database that this version writes. The old format 1 had no epoch,
// leases and sizes, and one change list for each revision; it can still be read.
const (
	stateFormat    = 2
	oldStateFormat = 1
)

// appendState appends the encoding of s to dst.
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

// decodeState is the inverse of appendState. It also decodes format 1.
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

// loadState reads the state from db. For an empty database it returns revision 1 and epoch 1.
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

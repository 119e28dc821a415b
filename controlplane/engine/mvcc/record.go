package mvcc

import (
	"encoding/binary"
	"fmt"
)

// What a version's value begins with.
const (
	recordTombstone = 0
	recordValue     = 1
	recordLeased    = 2 // a value with a lease
)

// version is what a key's newest version says of it; the zero version is a key that does not exist.
type version struct {
	create, mod, number int64

	lease int64 // 0: none
	size  int64 // of the value, bytes
}

func (v version) live() bool { return v.mod != 0 }

// versionBytes is what a version counts in sizes beside key and value.
const versionBytes = 32

// stored is the size of the version v of key in Size.
func (v version) stored(key []byte) int64 { return versionBytes + int64(len(key)) + v.size }

const maxVersionHeader = 1 + 3*binary.MaxVarintLen64

// appendVersionHeader appends what stands before the user's value.
func appendVersionHeader(dst []byte, v version) []byte {
	kind := byte(recordValue)
	if v.lease != 0 {
		kind = recordLeased
	}
	dst = append(dst, kind)
	dst = binary.AppendUvarint(dst, uint64(v.mod-v.create))
	dst = binary.AppendUvarint(dst, uint64(v.number))
	if v.lease != 0 {
		dst = binary.AppendUvarint(dst, uint64(v.lease))
	}
	return dst
}

// decodeVersion takes a version's value apart; a tombstone is the zero version. The value aliases b.
func decodeVersion(b []byte, mod int64) (version, []byte, error) {
	d := decoder{b: b}
	switch kind := d.byte(); kind {
	case recordTombstone:
		if d.err != nil || len(d.b) > 0 {
			return version{}, nil, fmt.Errorf("%w: tombstone at revision %d", ErrCorrupt, mod)
		}
		return version{}, nil, nil
	case recordValue, recordLeased:
		age, v := d.int64(), version{mod: mod, number: d.int64()}
		if kind == recordLeased {
			v.lease = int64(d.uint64())
		}
		if d.err != nil || age >= mod || v.number == 0 || (kind == recordLeased) != (v.lease != 0) {
			return version{}, nil, fmt.Errorf("%w: version at revision %d", ErrCorrupt, mod)
		}
		v.create, v.size = mod-age, int64(len(d.b))
		return v, d.b, nil
	default:
		return version{}, nil, fmt.Errorf("version at revision %d of kind %d: %w", mod, kind, ErrUnknownFormat)
	}
}

// state is everything of the engine that is neither a key nor a proposal's id. It is written with every batch.
type state struct {
	applied   Position
	revision  int64  // of the last transaction that changed something; 1 when none did
	floor     int64  // oldest revision that can be read
	time      int64  // highest stamp seen, Unix milliseconds
	keys      int64  // live keys
	proposals uint64 // ids ever recorded
	epoch     int64  // of the named records; from 1
	written   int64  // bytes of all versions ever written, as Size counts them
	live      int64  // bytes of the live versions, as Size counts them
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
	dst = binary.AppendUvarint(dst, uint64(s.floor))
	dst = binary.AppendUvarint(dst, uint64(s.time))
	dst = binary.AppendUvarint(dst, uint64(s.keys))
	dst = binary.AppendUvarint(dst, s.proposals)
	dst = binary.AppendUvarint(dst, uint64(s.epoch))
	dst = binary.AppendUvarint(dst, uint64(s.written))
	return binary.AppendUvarint(dst, uint64(s.live))
}

func decodeState(b []byte) (state, error) {
	d := decoder{b: b}
	f := d.byte()
	if d.err == nil && f != stateFormat && f != oldStateFormat {
		return state{}, fmt.Errorf("state of format %d, this program knows %d: %w", f, stateFormat, ErrUnknownFormat)
	}
	s := state{
		applied:  Position{Index: d.uint64(), Term: d.uint64()},
		revision: d.int64(), floor: d.int64(), time: d.int64(), keys: d.int64(), proposals: d.uint64(), epoch: 1,
	}
	if f == stateFormat {
		s.epoch, s.written, s.live = d.int64(), d.int64(), d.int64()
	}
	if d.err != nil || len(d.b) > 0 || s.revision < 1 || s.floor > s.revision || s.epoch < 1 {
		return state{}, fmt.Errorf("%w: state %x", ErrCorrupt, b)
	}
	return s, nil
}

// decoder reads the fields of a record. The first fault sticks; what is read after it is zero.
type decoder struct {
	b   []byte
	err error
}

func (d *decoder) fail() {
	d.b, d.err = nil, ErrMalformed
}

func (d *decoder) byte() byte {
	if len(d.b) == 0 {
		d.fail()
		return 0
	}
	v := d.b[0]
	d.b = d.b[1:]
	return v
}

func (d *decoder) uint64() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.fail()
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) int64() int64 {
	v := d.uint64()
	if int64(v) < 0 {
		d.fail()
		return 0
	}
	return int64(v)
}

// count reads a number of things of which each takes at least one byte more.
func (d *decoder) count(most int) int {
	v := d.uint64()
	if v > uint64(most) || v > uint64(len(d.b)) {
		d.fail()
		return 0
	}
	return int(v)
}

// bytes reads a length and that many bytes, which alias the input and cannot be appended to.
func (d *decoder) bytes(most int) []byte {
	n := d.count(most)
	v := d.b[:n:n]
	d.b = d.b[n:]
	return v
}

// take reads n bytes, which alias the input.
func (d *decoder) take(n int) []byte {
	if n > len(d.b) {
		d.fail()
		return nil
	}
	v := d.b[:n:n]
	d.b = d.b[n:]
	return v
}

func (d *decoder) fixed64() uint64 {
	if v := d.take(8); v != nil {
		return binary.BigEndian.Uint64(v)
	}
	return 0
}

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
type Meta struct {
	CreateRevision, ModRevision, Version int64

	Lease int64 // 0: none
	Size  int64 // of the value, bytes
}

func (v Meta) Live() bool { return v.ModRevision != 0 }

// versionBytes is what a version counts in sizes beside key and value.
const versionBytes = 32

// stored is the size of the version v of key in Size.
func (v Meta) storedBytes(key []byte) int64 { return versionBytes + int64(len(key)) + v.Size }

const maxVersionHeader = 1 + 3*binary.MaxVarintLen64

// appendVersionHeader appends what stands before the user's value.
func appendVersionHeader(dst []byte, v Meta) []byte {
	kind := byte(recordValue)
	if v.Lease != 0 {
		kind = recordLeased
	}
	dst = append(dst, kind)
	dst = binary.AppendUvarint(dst, uint64(v.ModRevision-v.CreateRevision))
	dst = binary.AppendUvarint(dst, uint64(v.Version))
	if v.Lease != 0 {
		dst = binary.AppendUvarint(dst, uint64(v.Lease))
	}
	return dst
}

// decodeVersion takes a version's value apart; a tombstone is the zero version. The value aliases b.
func decodeVersion(b []byte, mod int64) (Meta, []byte, error) {
	d := FieldDecoder{Rest: b}
	switch kind := d.Byte(); kind {
	case recordTombstone:
		if d.Err != nil || len(d.Rest) > 0 {
			return Meta{}, nil, fmt.Errorf("%w: tombstone at revision %d", ErrCorrupt, mod)
		}
		return Meta{}, nil, nil
	case recordValue, recordLeased:
		age, v := d.Int64(), Meta{ModRevision: mod, Version: d.Int64()}
		if kind == recordLeased {
			v.Lease = int64(d.Uint64())
		}
		if d.Err != nil || age >= mod || v.Version == 0 || (kind == recordLeased) != (v.Lease != 0) {
			return Meta{}, nil, fmt.Errorf("%w: version at revision %d", ErrCorrupt, mod)
		}
		v.CreateRevision, v.Size = mod-age, int64(len(d.Rest))
		return v, d.Rest, nil
	default:
		return Meta{}, nil, fmt.Errorf("version at revision %d of kind %d: %w", mod, kind, ErrUnknownFormat)
	}
}

// state is everything of the engine that is neither a key nor a proposal's id. It is written with every batch.
type state struct {
	applied         Position
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
	d := FieldDecoder{Rest: b}
	f := d.Byte()
	if d.Err == nil && f != stateFormat && f != oldStateFormat {
		return state{}, fmt.Errorf("state of format %d, this program knows %d: %w", f, stateFormat, ErrUnknownFormat)
	}
	s := state{
		applied:  Position{Index: d.Uint64(), Term: d.Uint64()},
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

// decoder reads the fields of a record. The first fault sticks; what is read after it is zero.
type FieldDecoder struct {
	Rest []byte
	Err  error
}

func (d *FieldDecoder) Fail() {
	d.Rest, d.Err = nil, ErrMalformed
}

func (d *FieldDecoder) Byte() byte {
	if len(d.Rest) == 0 {
		d.Fail()
		return 0
	}
	v := d.Rest[0]
	d.Rest = d.Rest[1:]
	return v
}

func (d *FieldDecoder) Uint64() uint64 {
	v, n := binary.Uvarint(d.Rest)
	if n <= 0 {
		d.Fail()
		return 0
	}
	d.Rest = d.Rest[n:]
	return v
}

func (d *FieldDecoder) Int64() int64 {
	v := d.Uint64()
	if int64(v) < 0 {
		d.Fail()
		return 0
	}
	return int64(v)
}

// count reads a number of things of which each takes at least one byte more.
func (d *FieldDecoder) Count(most int) int {
	v := d.Uint64()
	if v > uint64(most) || v > uint64(len(d.Rest)) {
		d.Fail()
		return 0
	}
	return int(v)
}

// bytes reads a length and that many bytes, which alias the input and cannot be appended to.
func (d *FieldDecoder) Bytes(most int) []byte {
	n := d.Count(most)
	v := d.Rest[:n:n]
	d.Rest = d.Rest[n:]
	return v
}

// take reads n bytes, which alias the input.
func (d *FieldDecoder) Take(n int) []byte {
	if n > len(d.Rest) {
		d.Fail()
		return nil
	}
	v := d.Rest[:n:n]
	d.Rest = d.Rest[n:]
	return v
}

func (d *FieldDecoder) Fixed64() uint64 {
	if v := d.Take(8); v != nil {
		return binary.BigEndian.Uint64(v)
	}
	return 0
}

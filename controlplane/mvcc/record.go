package mvcc

import (
	"encoding/binary"
	"fmt"
)

// What a version's value begins with. A version with a lease gets a kind of its own when leases come.
const (
	recordTombstone = 0
	recordValue     = 1
)

// version is what a key's newest version says of it; the zero version is a key that does not exist.
type version struct {
	create, mod, number int64
}

func (v version) live() bool { return v.mod != 0 }

const maxVersionHeader = 1 + 2*binary.MaxVarintLen64

// appendVersionHeader appends what stands before the user's value.
func appendVersionHeader(dst []byte, v version) []byte {
	dst = append(dst, recordValue)
	dst = binary.AppendUvarint(dst, uint64(v.mod-v.create))
	return binary.AppendUvarint(dst, uint64(v.number))
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
	case recordValue:
		age, number := d.int64(), d.int64()
		if d.err != nil || age >= mod || number == 0 {
			return version{}, nil, fmt.Errorf("%w: version at revision %d", ErrCorrupt, mod)
		}
		return version{create: mod - age, mod: mod, number: number}, d.b, nil
	default:
		return version{}, nil, fmt.Errorf("version at revision %d of kind %d: %w", mod, kind, ErrUnknownFormat)
	}
}

// change is one effect of a transaction: a key put or deleted at a revision.
type change struct {
	deleted  bool
	key      []byte
	value    []byte
	revision int64
	now      version // the zero version when deleted
	previous int64   // mod revision of the version it replaced, 0: there was none
}

// chunkBytes bounds the value of one record of changes.
const chunkBytes = 32 << 10

func appendChange(dst []byte, c *change) []byte {
	kind := byte(OpPut)
	if c.deleted {
		kind = byte(OpDelete)
	}
	dst = append(dst, kind)
	dst = binary.AppendUvarint(dst, uint64(len(c.key)))
	dst = append(dst, c.key...)
	if c.previous == 0 {
		return append(dst, 0)
	}
	return binary.AppendUvarint(dst, uint64(c.revision-c.previous))
}

// nextChange decodes the first change of a chunk and returns the rest. The key aliases b; value and version stay empty.
func nextChange(b []byte, revision int64) (change, []byte, error) {
	d := decoder{b: b}
	kind := OpKind(d.byte())
	c := change{deleted: kind == OpDelete, key: d.bytes(MaxKeyBytes), revision: revision}
	if age := d.int64(); age > 0 {
		c.previous = revision - age
	}
	if d.err != nil || c.previous < 0 || kind != OpPut && kind != OpDelete {
		return change{}, nil, fmt.Errorf("%w: changes of revision %d", ErrCorrupt, revision)
	}
	return c, d.b, nil
}

// state is everything of the engine that is neither a key nor a proposal's id. It is written with every batch.
type state struct {
	applied   Position
	revision  int64  // of the last transaction that changed something; 1 when none did
	floor     int64  // oldest revision that can be read
	time      int64  // highest stamp seen, Unix milliseconds
	keys      int64  // live keys
	proposals uint64 // ids ever recorded
}

// stateFormat is the version of everything in the Pebble keyspace.
const stateFormat = 1

func appendState(dst []byte, s state) []byte {
	dst = append(dst, stateFormat)
	dst = binary.AppendUvarint(dst, s.applied.Index)
	dst = binary.AppendUvarint(dst, s.applied.Term)
	dst = binary.AppendUvarint(dst, uint64(s.revision))
	dst = binary.AppendUvarint(dst, uint64(s.floor))
	dst = binary.AppendUvarint(dst, uint64(s.time))
	dst = binary.AppendUvarint(dst, uint64(s.keys))
	return binary.AppendUvarint(dst, s.proposals)
}

func decodeState(b []byte) (state, error) {
	d := decoder{b: b}
	if f := d.byte(); d.err == nil && f != stateFormat {
		return state{}, fmt.Errorf("state of format %d, this program knows %d: %w", f, stateFormat, ErrUnknownFormat)
	}
	s := state{
		applied:  Position{Index: d.uint64(), Term: d.uint64()},
		revision: d.int64(), floor: d.int64(), time: d.int64(), keys: d.int64(), proposals: d.uint64(),
	}
	if d.err != nil || len(d.b) > 0 || s.revision < 1 || s.floor > s.revision {
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

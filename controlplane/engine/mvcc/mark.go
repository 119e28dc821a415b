package mvcc

import "math"

// mark is what the index holds of a version, in 20 bytes; the zero mark is a key that does not exist. Where that is not
// enough it is partial: only mod counts then, and the rest has to be read.
type mark struct {
	modHigh, modLow uint32
	age             uint32 // revisions since the creation
	number          uint32
	size            uint32 // of the value
}

// partialMark is the size of a mark that does not say the rest: the version has a lease, was not read at the start, or has
// numbers that do not fit.
const partialMark = math.MaxUint32

// unreadBytes is the size from which versions are not read to fill an index, where Pebble keeps them apart: large values
// would be read whole for some bytes before them. The first put over such a key reads it, which costs little beside
// writing as much.
const unreadBytes = 1 << 10

func (v version) mark() mark {
	m := mark{modHigh: uint32(v.mod >> 32), modLow: uint32(v.mod), size: partialMark}
	if age := v.mod - v.create; v.lease == 0 && age <= math.MaxUint32 && v.number <= math.MaxUint32 && v.size < partialMark {
		m.age, m.number, m.size = uint32(age), uint32(v.number), uint32(v.size)
	}
	return m
}

func (m mark) mod() int64 { return int64(m.modHigh)<<32 | int64(m.modLow) }

func (m mark) live() bool { return m.modHigh|m.modLow != 0 }

func (m mark) partial() bool { return m.size == partialMark }

// version is what m says when it is not partial.
func (m mark) version() version {
	return version{create: m.mod() - int64(m.age), mod: m.mod(), number: int64(m.number), size: int64(m.size)}
}

// mark is that of what r.it stands at, a version of revision mod; the zero mark is a tombstone.
func (r *reader) mark(mod int64) (mark, error) {
	if v := r.it.LazyValue(); v.Fetcher != nil && v.Len() >= unreadBytes {
		m := version{mod: mod}.mark()
		m.size = partialMark
		return m, nil
	}
	h, err := r.held(mod)
	return h.mark(), err
}

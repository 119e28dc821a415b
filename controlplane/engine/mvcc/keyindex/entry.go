package keyindex

import (
	"math"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// mark is what the index holds of a version, in 20 bytes; the zero mark is a key that does not exist. Where that is not
// enough it is partial: only mod counts then, and the rest has to be read.
type Entry struct {
	modHigh, modLow uint32
	age             uint32 // revisions since the creation
	number          uint32
	size            uint32 // of the value
}

// partialMark is the size of a mark that does not say the rest: the version has a lease, was not read at the start, or has
// numbers that do not fit.
const partialEntry = math.MaxUint32

func NewEntry(v command.Meta) Entry {
	m := PartialEntry(v.ModRevision)
	if age := v.ModRevision - v.CreateRevision; v.Lease == 0 && age <= math.MaxUint32 && v.Version <= math.MaxUint32 && v.Size < partialEntry {
		m.age, m.number, m.size = uint32(age), uint32(v.Version), uint32(v.Size)
	}
	return m
}

// PartialEntry returns the entry of a version of which only the revision that wrote it is known.
func PartialEntry(modRevision int64) Entry {
	return Entry{modHigh: uint32(modRevision >> 32), modLow: uint32(modRevision), size: partialEntry}
}

func (m Entry) ModRevision() int64 { return int64(m.modHigh)<<32 | int64(m.modLow) }

func (m Entry) Live() bool { return m.modHigh|m.modLow != 0 }

func (m Entry) Partial() bool { return m.size == partialEntry }

// version is what m says when it is not partial.
func (m Entry) Meta() command.Meta {
	return command.Meta{CreateRevision: m.ModRevision() - int64(m.age), ModRevision: m.ModRevision(), Version: int64(m.number), Size: int64(m.size)}
}

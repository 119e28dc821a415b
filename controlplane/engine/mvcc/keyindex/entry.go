package keyindex

import (
	"math"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// Entry is the metadata of a live key's newest version, packed into 20 bytes. The zero Entry means that the key does
// not exist. Of a partial entry only ModRevision is known.
type Entry struct {
	modHigh, modLow uint32
	age             uint32 // revisions between creation and the last put
	number          uint32
	size            uint32 // bytes of the value; partialEntry: only the mod revision is known
}

// partialEntry is the value of Entry.size that marks an entry as partial: the version has a lease, or was not read when
// the index was built, or its numbers do not fit.
const partialEntry = math.MaxUint32

// NewEntry packs the metadata v. The entry is partial if v has a lease or a number that does not fit.
func NewEntry(v command.Meta) Entry {
	m := PartialEntry(v.ModRevision)
	age := v.ModRevision - v.CreateRevision
	if v.Lease == 0 && age <= math.MaxUint32 && v.Version <= math.MaxUint32 && v.Size < partialEntry {
		m.age, m.number, m.size = uint32(age), uint32(v.Version), uint32(v.Size)
	}
	return m
}

// PartialEntry returns the entry of a version of which only the revision that wrote it is known.
func PartialEntry(modRevision int64) Entry {
	return Entry{modHigh: uint32(modRevision >> 32), modLow: uint32(modRevision), size: partialEntry}
}

// ModRevision returns the revision that wrote the version.
func (m Entry) ModRevision() int64 { return int64(m.modHigh)<<32 | int64(m.modLow) }

// Live reports whether the key exists, that is, whether m is not the zero Entry.
func (m Entry) Live() bool { return m.modHigh|m.modLow != 0 }

// Partial reports whether only ModRevision is known.
func (m Entry) Partial() bool { return m.size == partialEntry }

// Meta returns the metadata. It must not be called on a partial entry.
func (m Entry) Meta() command.Meta {
	mod := m.ModRevision()
	return command.Meta{
		CreateRevision: mod - int64(m.age), ModRevision: mod, Version: int64(m.number), Size: int64(m.size),
	}
}

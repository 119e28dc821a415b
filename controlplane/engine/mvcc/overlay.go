package mvcc

import (
	"bytes"
	"hash/maphash"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// overlay is a hash table of the keys that were written but are not visible in Pebble yet: by earlier commands of the
// batch, or by earlier steps of the program. It does not copy keys and values. Its memory is reused after clear.
type overlay struct {
	seed    maphash.Seed
	slots   []uint32 // open addressing: 1 + position in entries; 0: empty
	entries []overlayEntry
	order   []uint32 // positions of the first len(order) entries, sorted by key
	leased  bool     // some entry has a lease
}

// overlayEntry is the pending state of one key.
type overlayEntry struct {
	key []byte
	keyState
	hash   uint32
	change int // position in applier.changes of the change that made this entry
}

// keyState is the newest version of a key. The zero Meta means that the key does not exist.
type keyState struct {
	command.Meta
	value []byte // nil if only the metadata was read; valid as long as the function that returned it says
}

const overlaySlots = 64

// clear removes all entries.
func (o *overlay) clear() {
	if len(o.entries) == 0 {
		return
	}
	if cap(o.entries) > bufferedItems {
		*o = overlay{seed: o.seed}
		return
	}
	clear(o.slots)
	clear(o.entries)
	o.entries, o.order, o.leased = o.entries[:0], o.order[:0], false
}

// find returns the entry of key, or nil.
func (o *overlay) find(key []byte) *overlayEntry {
	if len(o.entries) == 0 {
		return nil
	}
	at, ok := o.slot(key, uint32(maphash.Bytes(o.seed, key)))
	if !ok {
		return nil
	}
	return &o.entries[o.slots[at]-1]
}

// slot returns the slot of key and true. If the table does not have the key, slot returns the empty slot in which to
// store it, and false.
func (o *overlay) slot(key []byte, hash uint32) (at int, ok bool) {
	mask := uint32(len(o.slots) - 1)
	for i := hash & mask; ; i = (i + 1) & mask {
		place := o.slots[i]
		if place == 0 {
			return int(i), false
		}
		if e := &o.entries[place-1]; e.hash == hash && bytes.Equal(e.key, key) {
			return int(i), true
		}
	}
}

// put adds or replaces the entry of e.key.
func (o *overlay) put(e overlayEntry) {
	if len(o.slots) == 0 {
		o.seed, o.slots = maphash.MakeSeed(), make([]uint32, overlaySlots)
	}
	o.leased = o.leased || e.Lease != 0
	e.hash = uint32(maphash.Bytes(o.seed, e.key))
	at, ok := o.slot(e.key, e.hash)
	if ok {
		o.entries[o.slots[at]-1] = e
		return
	}
	o.entries = append(o.entries, e)
	o.slots[at] = uint32(len(o.entries))
	if 2*len(o.entries) > len(o.slots) {
		o.grow()
	}
}

// grow doubles the number of slots.
func (o *overlay) grow() {
	o.slots = make([]uint32, 2*len(o.slots))
	mask := uint32(len(o.slots) - 1)
	for i := range o.entries {
		at := o.entries[i].hash & mask
		for o.slots[at] != 0 {
			at = (at + 1) & mask
		}
		o.slots[at] = uint32(i) + 1
	}
}

// between returns the positions of the keys in [key, end) in order. They are valid until the next put.
func (o *overlay) between(key, end []byte) []uint32 {
	if len(o.entries) == 0 {
		return nil
	}
	byKey := func(a uint32, key []byte) int { return bytes.Compare(o.entries[a].key, key) }
	if known := len(o.order); len(o.entries)-known > known/8 {
		for i := known; i < len(o.entries); i++ {
			o.order = append(o.order, uint32(i))
		}
		slices.SortFunc(o.order, func(a, b uint32) int { return byKey(a, o.entries[b].key) })
	} else {
		for i := known; i < len(o.entries); i++ {
			at, _ := slices.BinarySearchFunc(o.order, o.entries[i].key, byKey)
			o.order = slices.Insert(o.order, at, uint32(i))
		}
	}
	from, found := slices.BinarySearchFunc(o.order, key, byKey)
	switch {
	case len(end) == 0 && found:
		return o.order[from : from+1]
	case len(end) == 0:
		return nil
	case command.IsFromKey(end):
		return o.order[from:]
	}
	to, _ := slices.BinarySearchFunc(o.order, end, byKey)
	return o.order[from:max(from, to)]
}

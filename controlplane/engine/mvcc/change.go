package mvcc

import (
	"encoding/binary"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// change is one effect of a transaction: a key put or deleted at a revision. One revision may change a key more than
// once: only its last change makes a version.
type change struct {
	deleted         bool
	superseded      bool // the same revision changes the key again
	key             []byte
	value           []byte
	revision        int64
	after           command.Meta // the zero version when deleted
	before          command.Meta // that it found
	prevModRevision int64        // mod revision of what the key held before the revision, 0: nothing

	// releases is the size of the version that a compaction behind the revision can let go of; 0 when an earlier change
	// of the revision already releases it.
	freedBytes int64
}

// The lists of changes, one list a batch: chunks under the revision of their first change. A list of format 1 is one
// revision's.
const (
	changePut              = 3
	changeDelete           = 4
	changeSupersededPut    = 5 // a put whose revision changes the key again; the version is here and nowhere else
	changeSupersededDelete = 6 // a delete whose revision puts the key again
	oldPut                 = 1 // without a size
	oldDelete              = 2

	changeKind = 0x7f
	// changeNext is set in a change's first byte where the next revision begins.
	changeNext = 0x80
)

// chunkBytes bounds the value of one record of changes.
const chunkBytes = 32 << 10

func appendChange(dst []byte, c *change, next bool) []byte {
	kind := byte(changePut)
	switch {
	case c.deleted && c.superseded:
		kind = changeSupersededDelete
	case c.deleted:
		kind = changeDelete
	case c.superseded:
		kind = changeSupersededPut
	}
	if next {
		kind |= changeNext
	}
	dst = append(dst, kind)
	dst = binary.AppendUvarint(dst, uint64(len(c.key)))
	dst = append(dst, c.key...)
	if c.prevModRevision == 0 {
		dst = append(dst, 0)
	} else {
		dst = binary.AppendUvarint(dst, uint64(c.revision-c.prevModRevision))
		dst = binary.AppendUvarint(dst, uint64(c.freedBytes))
	}
	if kind&changeKind == changeSupersededPut {
		var header [maxVersionHeader]byte
		head := appendVersionHeader(header[:0], c.after)
		dst = binary.AppendUvarint(dst, uint64(len(head)+len(c.value)))
		dst = append(append(dst, head...), c.value...)
	}
	return dst
}

// changes reads one chunk.
type chunkReader struct {
	b        []byte
	revision int64 // of the present change, and before the first one that of the chunk
	ordinal  int   // of the present change among those of its revision
	started  bool
}

// chunkAt begins to read the chunk b that is stored at key.
func newChunkReader(key, b []byte) (chunkReader, error) {
	revision, place, err := splitChangesKey(key)
	return chunkReader{b: b, revision: revision, ordinal: place}, err
}

// next decodes the next change; ok is false at the end. Key and value alias the chunk; only of a passing put it has
// version and value.
func (l *chunkReader) next() (c change, ok bool, err error) {
	if len(l.b) == 0 {
		return change{}, false, nil
	}
	d := command.FieldDecoder{Rest: l.b}
	kind := d.Byte()
	switch {
	case kind&changeNext != 0:
		l.revision, l.ordinal = l.revision+1, 0
	case l.started:
		l.ordinal++
	}
	bad := kind&changeNext != 0 && !l.started
	kind &= changeKind
	l.started = true
	c = change{key: d.Bytes(command.MaxKeyBytes), revision: l.revision}
	if age := d.Int64(); age > 0 {
		c.prevModRevision = l.revision - age
		if kind > oldDelete {
			c.freedBytes = d.Int64()
		}
	}
	switch kind {
	case changePut, oldPut:
	case changeDelete, oldDelete:
		c.deleted = true
	case changeSupersededDelete:
		c.deleted, c.superseded = true, true
	case changeSupersededPut:
		c.superseded = true
		b := d.Bytes(maxVersionHeader + command.MaxValueBytes)
		if d.Err == nil {
			c.after, c.value, d.Err = decodeVersion(b, l.revision)
		}
	default:
		bad = true
	}
	if d.Err != nil || bad || c.prevModRevision < 0 {
		return change{}, false, fmt.Errorf("%w: changes of revision %d", ErrCorrupt, l.revision)
	}
	l.b = d.Rest
	return c, true, nil
}

// event is c as watchers see it, still aliasing c.
func (c *change) event() watch.Event {
	e := watch.Event{Type: watch.EventPut, PrevModRevision: c.prevModRevision}
	if c.deleted {
		e.Type = watch.EventDelete
		e.KV = KV{Key: c.key, ModRevision: c.revision}
		return e
	}
	e.KV = KV{
		Key: c.key, Value: c.value, CreateRevision: c.after.CreateRevision, ModRevision: c.after.ModRevision, Version: c.after.Version, Lease: c.after.Lease,
	}
	return e
}

// changeList implements Changes for the hub of watchers.
type changeList []change

// Len returns the number of changes.
func (l *changeList) Len() int { return len(*l) }

// Event returns the i-th change as an event.
func (l *changeList) Event(i int) watch.Event { return (*l)[i].event() }

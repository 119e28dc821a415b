package mvcc

import (
	"encoding/binary"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// change is the effect of a command on one key: a put or a delete at a revision. A revision may change a key several
// times; only the last of these changes becomes a version.
type change struct {
	deleted         bool
	superseded      bool // a later change of the same revision changes the key again
	key             []byte
	value           []byte
	revision        int64
	after           command.Meta // metadata of the new version; zero for a delete
	before          command.Meta // metadata of the version that the change replaces; zero: none
	prevModRevision int64        // mod revision of the version that the whole revision replaces; 0: none

	// freedBytes is the size of the version that becomes removable once the revision is compacted. It is 0 if there is
	// no such version, or if an earlier change of the same revision already counts that version.
	freedBytes int64
}

// The change log lists what each revision changed. The changes of a batch are stored in chunks; the Pebble key of a
// chunk contains the revision of its first change. In the old format 1, each revision had a list of its own. The
// constants are the first byte of an encoded change.
const (
	changePut              = 3
	changeDelete           = 4
	changeSupersededPut    = 5 // a put that the same revision supersedes; its version is stored only here
	changeSupersededDelete = 6 // a delete after which the same revision puts the key again
	oldPut                 = 1 // format 1: without freedBytes
	oldDelete              = 2

	changeKind = 0x7f
	// changeNext is a flag in the first byte of a change: the change is the first one of its revision. The first change
	// of a chunk never has this flag, since the key of the chunk contains its revision.
	changeNext = 0x80
)

// chunkBytes is the size in bytes from which a chunk is complete, so that the next change begins another one.
const chunkBytes = 32 << 10

// appendChange appends the encoding of c. The parameter next must be true if c is the first change of its revision but
// not the first change of its chunk.
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

// chunkReader decodes one chunk of the change log.
type chunkReader struct {
	b        []byte
	revision int64 // of the current change; before the first one, that of the chunk
	ordinal  int   // position of the current change within its revision
	started  bool
}

// newChunkReader returns a reader of the chunk b that is stored at key.
func newChunkReader(key, b []byte) (chunkReader, error) {
	revision, place, err := splitChangesKey(key)
	return chunkReader{b: b, revision: revision, ordinal: place}, err
}

// next decodes the next change; ok is false at the end. The key and value of c alias the chunk. The fields value and
// after of c are set only for superseded puts, since other values are stored as versions.
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

// event returns c as a watch event without the field Prev. The event aliases the key and value of c.
func (c *change) event() watch.Event {
	e := watch.Event{Type: watch.EventPut, PrevModRevision: c.prevModRevision}
	if c.deleted {
		e.Type = watch.EventDelete
		e.KV = KV{Key: c.key, ModRevision: c.revision}
		return e
	}
	e.KV = KV{
		Key: c.key, Value: c.value, CreateRevision: c.after.CreateRevision, ModRevision: c.after.ModRevision,
		Version: c.after.Version, Lease: c.after.Lease,
	}
	return e
}

// changeList is the changes of a batch. It implements watch.Changes.
type changeList []change

// Len returns the number of changes.
func (l *changeList) Len() int { return len(*l) }

// Event returns the i-th change as an event.
func (l *changeList) Event(i int) watch.Event { return (*l)[i].event() }

package command

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
)

// Limits of a transaction. EncodeTxn checks all of them. Decoder.Decode checks only those that are cheap to check.
const (
	MaxKeyBytes   = 4 << 10
	MaxValueBytes = 1536<<10 + 64<<10 // 1.5 MiB, the limit promised to users, and room for metadata around it
	MaxTxnOps     = 10_000
	MaxTxnGuards  = 10_000
	MaxTxnBytes   = 8 << 20 // bytes of the encoded transaction

	// MaxTxnChanges is the maximum number of changes of one command. Each key that a range delete removes counts as
	// one. All members must refuse the same commands, so changing the limit needs a new command format.
	MaxTxnChanges = 1_000_000
)

// Txn is a transaction that was decided before it was proposed. Guards say what was read, and Ops what to write. If all
// guards hold, all ops are applied at one new revision; otherwise nothing is written.
//
// A key may be put only once. A transaction that puts a key must not also delete it.
type Txn struct {
	Time   int64 // Unix milliseconds, stamped by the proposer
	Guards []Guard
	Ops    []Op
}

// Guard is a read that must still be valid when the transaction is applied.
//
// Without an End, the mod revision of Key must be ModRevision; 0 means that Key must not exist. With an End, the range
// [Key, End) must contain Count live keys, and ModRevision must be the highest of their mod revisions. A put in the
// range raises the highest mod revision, and a delete lowers the count.
type Guard struct {
	Key, End    []byte
	ModRevision int64
	Count       int64
}

// OpKind is the kind of an Op.
type OpKind uint8

// The numbers of the kinds are stored in the raft log and must never change.
const (
	OpPut         OpKind = 1 // writes Value at Key
	OpDelete      OpKind = 2 // removes Key; no effect if it does not exist
	OpDeleteRange OpKind = 3 // removes [Key, End)
)

// Op is one write of a Txn.
type Op struct {
	Kind       OpKind
	Key, Value []byte
	End        []byte
}

// Put returns the Op that writes value at key.
func Put(key, value []byte) Op { return Op{Kind: OpPut, Key: key, Value: value} }

// Delete returns the Op that removes key.
func Delete(key []byte) Op { return Op{Kind: OpDelete, Key: key} }

// DeleteRange returns the Op that removes the keys of [key, end).
func DeleteRange(key, end []byte) Op { return Op{Kind: OpDeleteRange, Key: key, End: end} }

// Validate checks the limits of t. It also checks that no key is put twice, or put and deleted. Its errors wrap
// ErrEmptyKey, ErrTooLarge, ErrTooMany, ErrDuplicateKey or ErrInvalid.
func (t *Txn) Validate() error {
	switch {
	case t.Time < 0:
		return fmt.Errorf("time %d is negative: %w", t.Time, ErrInvalid)
	case len(t.Guards) > MaxTxnGuards:
		return fmt.Errorf("%d guards, at most %d: %w", len(t.Guards), MaxTxnGuards, ErrTooMany)
	case len(t.Ops) > MaxTxnOps:
		return fmt.Errorf("%d ops, at most %d: %w", len(t.Ops), MaxTxnOps, ErrTooMany)
	}
	for i := range t.Guards {
		g := &t.Guards[i]
		if err := validateRange(g.Key, g.End); err != nil {
			return fmt.Errorf("guard %d: %w", i, err)
		}
		if g.ModRevision < 0 || g.Count < 0 || len(g.End) == 0 && g.Count != 0 {
			return fmt.Errorf("guard %d: mod revision %d, count %d: %w", i, g.ModRevision, g.Count, ErrInvalid)
		}
	}
	for i := range t.Ops {
		if err := t.Ops[i].validate(); err != nil {
			return fmt.Errorf("op %d: %w", i, err)
		}
	}
	return t.validateOnce()
}

// validate checks that o has the fields that its kind needs and no others, and that they are within the limits.
func (o *Op) validate() error {
	switch o.Kind {
	case OpPut, OpDelete:
		if len(o.End) > 0 {
			return fmt.Errorf("an end for an operation on a single key: %w", ErrInvalid)
		}
	case OpDeleteRange:
		if len(o.End) == 0 {
			return fmt.Errorf("a delete of a range without an end: %w", ErrInvalid)
		}
	default:
		return fmt.Errorf("kind %d: %w", o.Kind, ErrInvalid)
	}
	if len(o.Value) > MaxValueBytes {
		return fmt.Errorf("value of %d bytes, at most %d: %w", len(o.Value), MaxValueBytes, ErrTooLarge)
	}
	if o.Kind != OpPut && len(o.Value) > 0 {
		return fmt.Errorf("a delete with a value: %w", ErrInvalid)
	}
	return validateRange(o.Key, o.End)
}

// validateRange checks that key and end are within the limits, and that at least one of them is not empty.
func validateRange(key, end []byte) error {
	switch {
	case len(key) == 0 && len(end) == 0:
		return ErrEmptyKey
	case len(key) > MaxKeyBytes:
		return fmt.Errorf("key of %d bytes, at most %d: %w", len(key), MaxKeyBytes, ErrTooLarge)
	case len(end) > MaxKeyBytes+1: // one byte more, for the key after the longest one
		return fmt.Errorf("end of %d bytes, at most %d: %w", len(end), MaxKeyBytes+1, ErrTooLarge)
	}
	return nil
}

// validateOnce fails with ErrDuplicateKey if t puts a key twice, or puts and deletes the same key.
func (t *Txn) validateOnce() error {
	if len(t.Ops) < 2 {
		return nil
	}
	puts := make([][]byte, 0, len(t.Ops))
	for i := range t.Ops {
		if t.Ops[i].Kind == OpPut {
			puts = append(puts, t.Ops[i].Key)
		}
	}
	slices.SortFunc(puts, bytes.Compare)
	for i := 1; i < len(puts); i++ {
		if bytes.Equal(puts[i-1], puts[i]) {
			return fmt.Errorf("put %q twice: %w", puts[i], ErrDuplicateKey)
		}
	}
	for i := range t.Ops {
		o := &t.Ops[i]
		if o.Kind == OpPut {
			continue
		}
		at, _ := slices.BinarySearchFunc(puts, o.Key, bytes.Compare)
		if at < len(puts) && InRange(puts[at], o.Key, o.End) {
			return fmt.Errorf("put and delete %q: %w", puts[at], ErrDuplicateKey)
		}
	}
	return nil
}

// The first byte of an encoded guard: whether it is for one key or for a range.
const (
	guardPoint = 0
	guardRange = 1
)

// EncodeTxn validates t and returns it as the Data of a Command. Its errors are those of Validate, and ErrTooLarge for
// more than MaxTxnBytes.
func EncodeTxn(t Txn) ([]byte, error) {
	if err := t.Validate(); err != nil {
		return nil, err
	}
	const numbers = 1 + 3*binary.MaxVarintLen64
	size := numbers
	for i := range t.Guards {
		size += numbers + len(t.Guards[i].Key) + len(t.Guards[i].End)
	}
	for i := range t.Ops {
		size += 1 + 2*binary.MaxVarintLen32 + len(t.Ops[i].Key) + len(t.Ops[i].Value) + len(t.Ops[i].End)
	}
	b := make([]byte, 0, size)
	b = append(b, commandFormat, byte(KindTxn))
	b = binary.AppendUvarint(b, uint64(t.Time))
	b = binary.AppendUvarint(b, uint64(len(t.Guards)))
	for i := range t.Guards {
		b = t.Guards[i].append(b)
	}
	b = binary.AppendUvarint(b, uint64(len(t.Ops)))
	for i := range t.Ops {
		b = t.Ops[i].append(b)
	}
	if len(b) > MaxTxnBytes {
		return nil, fmt.Errorf("transaction of %d bytes, at most %d: %w", len(b), MaxTxnBytes, ErrTooLarge)
	}
	return b, nil
}

func (g *Guard) append(b []byte) []byte {
	if len(g.End) == 0 {
		b = appendBytes(append(b, guardPoint), g.Key)
		return binary.AppendUvarint(b, uint64(g.ModRevision))
	}
	b = appendBytes(append(b, guardRange), g.Key)
	b = appendBytes(b, g.End)
	b = binary.AppendUvarint(b, uint64(g.ModRevision))
	return binary.AppendUvarint(b, uint64(g.Count))
}

func (o *Op) append(b []byte) []byte {
	b = appendBytes(append(b, byte(o.Kind)), o.Key)
	switch o.Kind {
	case OpPut:
		return appendBytes(b, o.Value)
	case OpDeleteRange:
		return appendBytes(b, o.End)
	}
	return b
}

// decode decodes b, an encoded transaction without its format and kind bytes, into t. It reuses t's slices. Keys and
// values alias b.
func (t *Txn) decode(b []byte) error {
	d := FieldDecoder{Rest: b}
	t.Time = d.Int64()
	t.Guards, t.Ops = t.Guards[:0], t.Ops[:0]
	for n := d.Count(MaxTxnGuards); n > 0 && d.Err == nil; n-- {
		g := Guard{}
		kind := d.Byte()
		g.Key = d.Bytes(MaxKeyBytes)
		if kind == guardRange {
			g.End = d.Bytes(MaxKeyBytes + 1)
		}
		g.ModRevision = d.Int64()
		if kind == guardRange {
			g.Count = d.Int64()
		}
		if kind > guardRange || (kind == guardRange) != (len(g.End) > 0) || validateRange(g.Key, g.End) != nil {
			d.Fail()
		}
		t.Guards = append(t.Guards, g)
	}
	for n := d.Count(MaxTxnOps); n > 0 && d.Err == nil; n-- {
		o := Op{Kind: OpKind(d.Byte()), Key: d.Bytes(MaxKeyBytes)}
		switch o.Kind {
		case OpPut:
			o.Value = d.Bytes(MaxValueBytes)
		case OpDeleteRange:
			o.End = d.Bytes(MaxKeyBytes + 1)
		}
		if o.validate() != nil {
			d.Fail()
		}
		t.Ops = append(t.Ops, o)
	}
	if d.Err == nil && (len(d.Rest) > 0 || t.validateOnce() != nil) {
		d.Fail()
	}
	return d.Err
}

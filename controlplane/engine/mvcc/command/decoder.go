package command

import "fmt"

// Kind is the kind of an encoded command.
type Kind uint8

// The numbers of the kinds are stored in the raft log and must never change.
const (
	KindTxn     Kind = 1 // made by EncodeTxn
	KindCompact Kind = 2 // made by EncodeCompact
	KindProgram Kind = 3 // made by EncodeProgram
)

// commandFormat is the first byte of an encoded command; its Kind is the second.
const commandFormat = 1

// maxReusedItems is the capacity, in items, of the largest slice that a Decoder reuses for the next command.
const maxReusedItems = 1024

// Decoder decodes the Data of commands. It reuses its memory: what Decode returned is valid until the next Decode or
// Reset, and aliases the data.
type Decoder struct {
	Txn     Txn      // set after KindTxn
	Program *Program // set after KindProgram
	Compact int64    // set after KindCompact: the revision to compact at

	program programDecoder
}

// Decode decodes data, which must not be empty, and returns its Kind. The decoded command is in the field of d for that
// Kind. Errors wrap ErrUnknownFormat or ErrMalformed.
func (d *Decoder) Decode(data []byte) (Kind, error) {
	f := FieldDecoder{Rest: data}
	if format := f.Byte(); format != commandFormat {
		return 0, fmt.Errorf("format %d: %w", format, ErrUnknownFormat)
	}
	kind := Kind(f.Byte())
	if f.Err != nil {
		return 0, f.Err
	}
	var err error
	switch kind {
	case KindTxn:
		err = d.Txn.decode(f.Rest)
	case KindProgram:
		d.Program, err = d.program.decode(f.Rest)
	case KindCompact:
		if d.Compact = f.Int64(); f.Err == nil && len(f.Rest) > 0 {
			f.Fail()
		}
		err = f.Err
	default:
		err = fmt.Errorf("kind %d: %w", kind, ErrUnknownFormat)
	}
	return kind, err
}

// Reset discards the decoded command. It reuses slices of at most maxReusedItems items for the next commands.
func (d *Decoder) Reset() {
	if max(cap(d.Txn.Guards), cap(d.Txn.Ops)) > maxReusedItems {
		d.Txn = Txn{}
	}
	clear(d.Txn.Guards[:cap(d.Txn.Guards)])
	clear(d.Txn.Ops[:cap(d.Txn.Ops)])
	d.program.clear()
	d.Program = nil
}

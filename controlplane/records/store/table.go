package store

import (
	"fmt"
	"strings"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// Table holds the records of one type T. The key of a record is the table's name followed by a path of IDs, such as
// vm/<project>/<id>, so that a prefix of a path selects all records below it. The parts of a path contain no slash.
//
// The value of a record is one byte with the version of the encoding, followed by CBOR (RFC 8949). Fields are
// identified by name: older members ignore fields that they do not have, and newer members decode missing fields as
// zero.
type Table[T any] struct{ name string }

// NewTable returns the table with the given name. Names must be unique, because two tables with the same name would
// share their records.
func NewTable[T any](name string) Table[T] { return Table[T]{name} }

const recordVersion = 1

// Object is implemented by records of objects that users name, such as VMs. A transaction collects the names of those
// that Get returns, for the audit record of the call: see Tx.NameOf.
type Object interface{ IDAndName() (id, name string) }

// lenient is the default CBOR decoder, except that it accepts strings that are not UTF-8, because the encoder accepts
// them too.
var lenient = func() cbor.DecMode {
	mode, err := cbor.DecOptions{UTF8: cbor.UTF8DecodeInvalid}.DecMode()
	if err != nil {
		panic(err) // happens only if the options are invalid
	}
	return mode
}()

func (t Table[T]) key(path []string) []byte {
	size := len(t.name)
	for _, p := range path {
		size += 1 + len(p)
	}
	key := make([]byte, 0, size)
	key = append(key, t.name...)
	for _, p := range path {
		key = append(key, '/')
		key = append(key, p...)
	}
	return key
}

// below returns the range of the keys of all records below a path. start is inclusive, end is exclusive.
func (t Table[T]) below(path []string) (start, end []byte) {
	start = append(t.key(path), '/')
	return start, command.PrefixEnd(start)
}

// path returns the path of a record from its key: the parts after the table's name.
func (t Table[T]) path(key []byte) []string {
	return strings.Split(string(key[len(t.name)+1:]), "/")
}

// checkPath returns an error if a part of the path is empty or contains a slash. Otherwise two different paths could
// have the same key.
func checkPath(path []string) error {
	for _, p := range path {
		if p == "" || strings.Contains(p, "/") {
			return fmt.Errorf("%q cannot be part of a record's path", p)
		}
	}
	return nil
}

// Get returns the record at path, or nil if it does not exist.
func (t Table[T]) Get(r Reader, path ...string) (*T, error) {
	if err := checkPath(path); err != nil {
		return nil, nil
	}
	key := t.key(path)
	value, err := r.view().get(key)
	if err != nil || value == nil {
		return nil, err
	}
	out, err := t.decode(key, value)
	if o, ok := any(out).(Object); ok && err == nil {
		r.view().names.add(o.IDAndName())
	}
	return out, err
}

// Has reports whether a record exists at path.
func (t Table[T]) Has(r Reader, path ...string) (bool, error) {
	if err := checkPath(path); err != nil {
		return false, nil
	}
	value, err := r.view().get(t.key(path))
	return value != nil, err
}

// Put writes the record at path when the transaction commits. If the path is invalid or value cannot be encoded, Update
// returns that error and writes nothing.
func (t Table[T]) Put(tx *Tx, value *T, path ...string) {
	err := checkPath(path)
	var body []byte
	if err == nil {
		body, err = cbor.Marshal(value)
	}
	if err != nil {
		if tx.err == nil {
			tx.err = fmt.Errorf("write %s: %w", t.key(path), err)
		}
		return
	}
	tx.put(t.key(path), append([]byte{recordVersion}, body...))
}

// Delete removes the record at path when the transaction commits. It is a no-op if the record does not exist.
func (t Table[T]) Delete(tx *Tx, path ...string) { tx.delete(t.key(path)) }

// Record is a record's value with its path in the table.
type Record[T any] struct {
	Path  []string
	Value *T
}

// List returns up to limit records below path, in order of their paths; limit 0 means no limit. more reports whether
// there are further records.
func (t Table[T]) List(r Reader, limit int, path ...string) (records []Record[T], more bool, err error) {
	start, end := t.below(path)
	return t.list(r, start, end, limit)
}

// ListAfter is like List, but returns only records whose paths follow the path given as after. There need not be a
// record at that path. If it is empty, ListAfter starts at the first record.
func (t Table[T]) ListAfter(r Reader, limit int, after []string, path ...string) (records []Record[T], more bool, err error) {
	if len(after) == 0 {
		return t.List(r, limit, path...)
	}
	_, end := t.below(path)
	return t.list(r, append(t.key(after), 0), end, limit)
}

func (t Table[T]) list(r Reader, start, end []byte, limit int) (records []Record[T], more bool, err error) {
	pairs, more, err := r.view().scan(start, end, limit)
	if err != nil {
		return nil, false, err
	}
	records = make([]Record[T], 0, len(pairs))
	for _, p := range pairs {
		value, err := t.decode(p.key, p.value)
		if err != nil {
			return nil, false, err
		}
		records = append(records, Record[T]{t.path(p.key), value})
	}
	return records, more, nil
}

func (t Table[T]) decode(key, value []byte) (*T, error) {
	if len(value) == 0 || value[0] != recordVersion {
		return nil, fmt.Errorf("record %s is of a version that this program does not know: upgrade it", key)
	}
	out := new(T)
	if err := lenient.Unmarshal(value[1:], out); err != nil {
		return nil, fmt.Errorf("decode %s: %w", key, err)
	}
	return out, nil
}

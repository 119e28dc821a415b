package store

import (
	"fmt"
	"strings"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// Table is the records of one type. Its keys are paths below its name, so that a path's beginning selects all below it:
// vm/<project>/<id>. Parts of a path hold no slash.
//
// Values are CBOR (RFC 8949) after a byte of version. Fields are known by name: a member that is older ignores what it
// does not know, one that is newer sees zero for what is not there.
type Table[T any] struct{ name string }

// NewTable names a table. Two tables of one name would share their records.
func NewTable[T any](name string) Table[T] { return Table[T]{name} }

const recordVersion = 1

// lenient reads texts that are not UTF-8 too: what was written can be read.
var lenient = func() cbor.DecMode {
	mode, err := cbor.DecOptions{UTF8: cbor.UTF8DecodeInvalid}.DecMode()
	if err != nil {
		panic(err) // only for options that there are not
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

// below is the range of all keys below a path.
func (t Table[T]) below(path []string) (start, end []byte) {
	start = append(t.key(path), '/')
	return start, command.PrefixEnd(start)
}

// path is the parts of a key below the table's name.
func (t Table[T]) path(key []byte) []string {
	return strings.Split(string(key[len(t.name)+1:]), "/")
}

// checkPath refuses parts that would be read as something else.
func checkPath(path []string) error {
	for _, p := range path {
		if p == "" || strings.Contains(p, "/") {
			return fmt.Errorf("%q cannot be part of a record's path", p)
		}
	}
	return nil
}

// Get is the record at path, nil when there is none.
func (t Table[T]) Get(r Reader, path ...string) (*T, error) {
	if err := checkPath(path); err != nil {
		return nil, nil
	}
	key := t.key(path)
	value, err := r.view().get(key)
	if err != nil || value == nil {
		return nil, err
	}
	return t.decode(key, value)
}

// Has reports whether there is a record at path.
func (t Table[T]) Has(r Reader, path ...string) (bool, error) {
	if err := checkPath(path); err != nil {
		return false, nil
	}
	value, err := r.view().get(t.key(path))
	return value != nil, err
}

// Put writes the record at path. An error shows when the update commits.
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

// Delete removes the record at path; nothing happens when there is none.
func (t Table[T]) Delete(tx *Tx, path ...string) { tx.delete(t.key(path)) }

// Record is a value with where it stands.
type Record[T any] struct {
	Path  []string
	Value *T
}

// List is up to limit records below path, in order of their paths; 0 is no limit. more says that it is not all.
func (t Table[T]) List(r Reader, limit int, path ...string) (records []Record[T], more bool, err error) {
	start, end := t.below(path)
	return t.list(r, start, end, limit)
}

// ListAfter is List from behind the record at after, which need not be there; from the first when after is empty.
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

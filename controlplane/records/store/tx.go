package store

import (
	"bytes"
	"fmt"
	"maps"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// View reads the records as of one revision.
type View struct {
	snap *mvcc.Snapshot
	// revision is the revision at which lists read, if it is older than that of snap. 0 means the revision of snap.
	revision int64
	// reads and writes belong to the Tx that contains this View; both are nil outside a transaction.
	reads  *reads
	writes map[string]write
	// names belongs to the Tx that contains this View, and is nil outside a transaction.
	names names
}

// names holds the names of the objects that a transaction has read, by their IDs.
type names map[string]string

// add adds a name, unless the object has one already: the first is the name before the transaction. It does nothing if
// n is nil.
func (n names) add(id, name string) {
	if _, exists := n[id]; n != nil && !exists {
		n[id] = name
	}
}

type write struct {
	value  []byte
	delete bool
}

// reads holds the guards of a transaction, without duplicates. A guard is a key or range that the transaction has read.
// The transaction conflicts if one of them has changed when it is applied.
type reads struct {
	guards []command.Guard
	seen   map[string]bool
}

func (r *reads) add(g command.Guard) {
	id := string(g.Key) + "\x00" + string(g.End)
	if !r.seen[id] {
		r.seen[id] = true
		r.guards = append(r.guards, g)
	}
}

// Reader is implemented by View and Tx.
type Reader interface{ view() *View }

func (v *View) view() *View { return v }

// Revision returns the revision at which the View reads.
func (v *View) Revision() int64 {
	if v.revision != 0 {
		return v.revision
	}
	return v.snap.Revision()
}

// at returns a View of an older revision. The View belongs to no transaction.
func (v *View) at(revision int64) *View { return &View{snap: v.snap, revision: revision} }

// get returns the value of a key, or nil if the key does not exist. It ignores v.revision, because only lists read
// older revisions.
func (v *View) get(key []byte) ([]byte, error) {
	if w, ok := v.writes[string(key)]; ok {
		return w.value, nil
	}
	kv, ok, err := v.snap.Get(key)
	if err != nil {
		return nil, history(fmt.Errorf("read %s: %w", key, err))
	}
	if v.reads != nil {
		v.reads.add(command.Guard{Key: key, ModRevision: kv.ModRevision})
	}
	if !ok {
		return nil, nil
	}
	return kv.Value, nil
}

type pair struct{ key, value []byte }

// scan returns up to limit records with keys in [start, end), in key order; limit 0 means no limit. In a transaction
// the result includes the transaction's own writes. scan then also adds a guard for the range that it has read. If
// there are more records, that range ends at the last key read.
func (v *View) scan(start, end []byte, limit int) (found []pair, more bool, err error) {
	ask := limit
	if len(v.writes) > 0 {
		ask = 0 // read without a limit, because own writes may add or hide records
	}
	asked := mvcc.RangeOptions{Key: start, End: end, Limit: ask, Revision: v.revision}
	res, err := v.snap.Range(asked)
	if err != nil {
		return nil, false, history(fmt.Errorf("read from %s: %w", start, err))
	}
	if v.reads != nil {
		v.reads.add(asked.Guard(res))
	}
	for _, kv := range res.KVs {
		if _, own := v.writes[string(kv.Key)]; !own {
			found = append(found, pair{kv.Key, kv.Value})
		}
	}
	for key, w := range v.writes {
		if k := []byte(key); !w.delete && bytes.Compare(k, start) >= 0 && bytes.Compare(k, end) < 0 {
			found = append(found, pair{k, w.value})
		}
	}
	if len(v.writes) > 0 {
		slices.SortFunc(found, func(a, b pair) int { return bytes.Compare(a.key, b.key) })
	}
	more = res.More
	if limit > 0 && len(found) > limit {
		found, more = found[:limit], true
	}
	return found, more, nil
}

// Tx is the View of a transaction, with methods to write.
type Tx struct {
	View
	now cloud.Time
	// err is the first error of a Put. Update returns it.
	err error
	// audited is the number of calls of CountAudited.
	audited uint64
}

// CountAudited reports that the transaction writes an audit record of a successful call. If the transaction commits,
// Update adds the number of these calls to Options.Audited.
func (tx *Tx) CountAudited() { tx.audited++ }

// Now returns the time of the transaction, in Unix milliseconds. It is the same on all members.
func (tx *Tx) Now() cloud.Time { return tx.now }

// Unguarded returns a View whose reads are not checked for conflicts at commit. Use it where an outdated read does no
// harm, such as to choose which old records to remove.
func (tx *Tx) Unguarded() *View { return &View{snap: tx.snap, writes: tx.writes, names: tx.names} }

// GuardedUnless returns tx itself. Tests can activate a deliberate fault (mutant) with the given name; GuardedUnless
// then returns tx.Unguarded().
func (tx *Tx) GuardedUnless(name string) Reader {
	if mutant.On(name) {
		return tx.Unguarded()
	}
	return tx
}

// NameOf returns the name that the object with an ID had before the transaction. It returns "" if the transaction has not
// read a record of the object with Table.Get.
func (tx *Tx) NameOf(id string) string { return tx.names[id] }

func (tx *Tx) put(key, value []byte) { tx.writes[string(key)] = write{value: value} }

func (tx *Tx) delete(key []byte) { tx.writes[string(key)] = write{delete: true} }

// DropUnchanged removes the writes that would change nothing: puts of the value that is already stored, and deletions
// of records that do not exist. An update without changes then has no log entry and no audit record. The records that
// were read are still checked for conflicts at commit.
func (tx *Tx) DropUnchanged() error {
	for key, w := range tx.writes {
		kv, there, err := tx.snap.Get([]byte(key))
		if err != nil {
			return history(fmt.Errorf("read %s: %w", key, err))
		}
		if w.delete && !there || !w.delete && there && bytes.Equal(kv.Value, w.value) {
			delete(tx.writes, key)
		}
	}
	return nil
}

// txn returns the guards and writes of the transaction as a command. Operations are sorted by key, so that equal
// changes are encoded as equal bytes.
func (tx *Tx) txn() command.Txn {
	t := command.Txn{Time: tx.now, Guards: tx.reads.guards}
	for _, key := range slices.Sorted(maps.Keys(tx.writes)) {
		if w := tx.writes[key]; w.delete {
			t.Ops = append(t.Ops, command.Delete([]byte(key)))
		} else {
			t.Ops = append(t.Ops, command.Put([]byte(key), w.value))
		}
	}
	return t
}

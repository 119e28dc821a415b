package steps

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// row is the value type of all tables that the clients write.
type row struct {
	Op    string // the operation that wrote the row
	N     int64
	Items []string
	At    cloud.Time
}

func (r *row) equal(o *row) bool {
	return r.Op == o.Op && r.N == o.N && r.At == o.At && slices.Equal(r.Items, o.Items)
}

// The tables that the clients write. Their invariants are checked by the functions in the variable invariants and by
// history.commit.
var (
	accounts  = store.NewTable[row]("account")
	names     = store.NewTable[row]("name")
	lists     = store.NewTable[row]("list")
	counters  = store.NewTable[row]("count")
	slots     = store.NewTable[row]("slot")
	registers = store.NewTable[row]("register")
	orders    = store.NewTable[row]("order")
	ops       = store.NewTable[row]("op")
)

const (
	accountCount = 5
	funds        = 100 // initial balance of each account
	slotLimit    = 4
)

// change is the change of one key at a revision: its row before and after. A nil row means that the key does not exist.
type change struct {
	key         string
	before, now *row
}

// invariants maps the name of a table to a function that returns an error if a change violates the table's invariant.
var invariants = map[string]func(change) error{
	"name": func(c change) error {
		if c.before != nil && c.now != nil {
			return errors.New("is claimed twice")
		}
		return nil
	},
	"list": func(c change) error {
		var before []string
		if c.before != nil {
			before = c.before.Items
		}
		if c.now == nil || !slices.Equal(c.now.Items, append(slices.Clone(before), c.now.Op)) {
			return errors.New("is not what it was and one more")
		}
		return nil
	},
	"count": func(c change) error {
		if c.now == nil || c.now.N != value(c.before)+1 {
			return errors.New("is not one more")
		}
		return nil
	},
	"op": func(c change) error {
		if c.before != nil {
			return errors.New("is applied twice")
		}
		return nil
	},
}

func value(r *row) int64 {
	if r == nil {
		return 0
	}
	return r.N
}

// history holds the events and rows of all revisions, as the first watcher received them.
type history struct {
	w      *world
	last   int64
	events map[int64]string     // events of each revision as text, for comparison
	rows   map[string][]version // versions of each key
	tables map[string][]string  // all keys that ever existed in each table, sorted
	ops    map[string]int64     // revision at which each operation was applied, by its name
	order  []string             // names of the applied operations, in log order
	keys   map[string]string    // key of each order in the table orders, by idempotency key
}

// version is the row that a key has from a revision on. If row is nil, the key was deleted.
type version struct {
	revision int64
	row      *row
}

func newHistory(w *world) history {
	return history{
		w: w, last: 1, events: map[int64]string{}, rows: map[string][]version{}, tables: map[string][]string{},
		ops: map[string]int64{}, keys: map[string]string{},
	}
}

// commit checks one complete revision that a watcher of the member m has received. If the revision is new, it checks
// the invariants and adds the revision to the history. Otherwise the events must be the same as in the history.
func (h *history) commit(m *member, revision int64, events []watch.Event) {
	text := formatEvents(events)
	if revision <= h.last {
		if text != h.events[revision] {
			h.w.fail("revision %d is %s on member %d, but was %s", revision, text, m.id, h.events[revision])
		}
		return
	}
	h.w.trace.Add("%d shows revision %d: %s", m.id, revision, text)
	if revision != h.last+1 {
		h.w.fail("member %d shows revision %d after %d", m.id, revision, h.last)
		return
	}
	h.last, h.events[revision] = revision, text
	var moved int64
	for _, e := range events {
		c, err := h.change(e)
		if err != nil {
			h.w.fail("revision %d: %v", revision, err)
			return
		}
		table, _, _ := strings.Cut(c.key, "/")
		if law := invariants[table]; law != nil {
			if err := law(c); err != nil {
				h.w.fail("revision %d: %s %v: %+v after %+v", revision, c.key, err, c.now, c.before)
			}
		}
		h.put(table, c, revision)
		if table == "account" {
			moved += value(c.now) - value(c.before)
		}
	}
	if founding := len(h.tables["op"]) == 1 && moved == accountCount*funds; moved != 0 && !founding {
		h.w.fail("revision %d changes the sum of all accounts by %d", revision, moved)
	}
	if n, any := len(h.table("slot", revision)), len(h.tables["slot"]) > 0; n > slotLimit || any && n == 0 {
		h.w.fail("revision %d: %d slots are taken, must be 1 to %d", revision, n, slotLimit)
	}
}

// formatEvents returns events as text, with all their fields.
func formatEvents(events []watch.Event) string {
	var b strings.Builder
	for _, e := range events {
		fmt.Fprintf(&b, "%d %s %d/%d/%d was %d", e.Type, e.KV.Key, e.KV.CreateRevision, e.KV.ModRevision, e.KV.Version, e.PrevModRevision)
		if len(e.KV.Value) > 0 {
			fmt.Fprintf(&b, " =%x", e.KV.Value)
		}
		if e.Prev != nil {
			fmt.Fprintf(&b, " was =%x", e.Prev.Value)
		}
		b.WriteString("; ")
	}
	return b.String()
}

func (h *history) change(e watch.Event) (c change, err error) {
	c.key = string(e.KV.Key)
	if kept := h.newest(c.key); (kept == nil) != (e.Prev == nil) {
		return c, fmt.Errorf("%s: its event says that there was %v before", c.key, e.Prev)
	}
	if e.Prev != nil {
		if c.before, err = decode(c.key, e.Prev.Value); err != nil {
			return c, err
		}
		if kept := h.newest(c.key); !kept.equal(c.before) {
			return c, fmt.Errorf("%s: its event says that it was %+v, but it was %+v", c.key, c.before, kept)
		}
	}
	if e.Type == watch.EventPut {
		c.now, err = decode(c.key, e.KV.Value)
	}
	return c, err
}

// decode decodes the value b of a key of any table. Values that package store itself writes (idempotency keys) are not
// decoded but copied to row.Op.
func decode(key string, b []byte) (*row, error) {
	r := &row{}
	if strings.HasPrefix(key, "idem") {
		r.Op = string(b)
		return r, nil
	}
	if len(b) == 0 {
		return nil, fmt.Errorf("%s: an empty record", key)
	}
	if err := cbor.Unmarshal(b[1:], r); err != nil {
		return nil, fmt.Errorf("decode %s: %w", key, err)
	}
	return r, nil
}

func (h *history) put(table string, c change, revision int64) {
	if _, known := h.rows[c.key]; !known {
		keys := h.tables[table]
		at, _ := slices.BinarySearch(keys, c.key)
		h.tables[table] = slices.Insert(keys, at, c.key)
	}
	h.rows[c.key] = append(h.rows[c.key], version{revision, c.now})
	switch table {
	case "op":
		name := strings.TrimPrefix(c.key, "op/")
		h.ops[name] = revision
		h.order = append(h.order, name)
	case "order":
		if first, again := h.keys[c.now.Op]; again {
			h.w.fail("revision %d: the idempotency key %s made %s and %s", revision, c.now.Op, first, c.key)
		}
		h.keys[c.now.Op] = c.key
	}
}

func (h *history) newest(key string) *row {
	if v := h.rows[key]; len(v) > 0 {
		return v[len(v)-1].row
	}
	return nil
}

// at returns the row of a key as of a revision, or nil if it did not exist.
func (h *history) at(key string, revision int64) *row {
	v := h.rows[key]
	n := sort.Search(len(v), func(i int) bool { return v[i].revision > revision })
	if n == 0 {
		return nil
	}
	return v[n-1].row
}

// found is a row of a table together with its key.
type found struct {
	key string
	row *row
}

// table returns all rows of a table as of a revision, in the order of their keys.
func (h *history) table(name string, revision int64) (all []found) {
	for _, key := range h.tables[name] {
		if r := h.at(key, revision); r != nil {
			all = append(all, found{key, r})
		}
	}
	return all
}

// compare checks the rows in got, which were read from the table name on the member m at a revision: they must be those
// in the history.
func (h *history) compare(m *member, name string, revision int64, got []store.Record[row]) {
	if revision > h.last {
		h.w.fail("member %d was read at revision %d, which no watcher has seen", m.id, revision)
		return
	}
	want := h.table(name, revision)
	same := slices.EqualFunc(want, got, func(w found, g store.Record[row]) bool {
		return w.key == name+"/"+strings.Join(g.Path, "/") && w.row.equal(g.Value)
	})
	if !same {
		h.w.fail("member %d says at revision %d that %s is %s, but it was %s", m.id, revision, name, show(got), showFound(want))
	}
}

func show(rows []store.Record[row]) string {
	var b bytes.Buffer
	for _, r := range rows {
		fmt.Fprintf(&b, "%v %+v; ", r.Path, *r.Value)
	}
	return b.String()
}

func showFound(rows []found) string {
	var b bytes.Buffer
	for _, r := range rows {
		fmt.Fprintf(&b, "%s %+v; ", r.key, *r.row)
	}
	return b.String()
}

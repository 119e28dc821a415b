package mvcc

import (
	"cmp"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// model is a simple reference implementation of the engine. It keeps a copy of all keys for each revision.
type model struct {
	states []map[string]KV // keys by revision; 0 is unused, at 1 there are none
	events [][]watch.Event // events by revision
	floor  int64
	time   int64
	ids    map[[16]byte]command.Result

	// Leases, records and epoch have no history.
	leases  map[int64]int64
	records map[string][]byte
	epoch   int64
}

func newModel() *model {
	return &model{states: []map[string]KV{nil, {}}, events: make([][]watch.Event, 2), ids: map[[16]byte]command.Result{},
		leases: map[int64]int64{}, records: map[string][]byte{}, epoch: 1}
}

func (m *model) revision() int64 { return int64(len(m.states)) - 1 }

// scan returns the keys of [key, end) at revision, in order.
func (m *model) scan(key, end []byte, revision int64) []KV {
	var out []KV
	for k, kv := range m.states[revision] {
		if command.InRange([]byte(k), key, end) {
			out = append(out, kv)
		}
	}
	slices.SortFunc(out, func(a, b KV) int { return strings.Compare(string(a.Key), string(b.Key)) })
	return out
}

func (m *model) txn(t command.Txn) command.Result {
	m.time = max(m.time, t.Time)
	for i, g := range t.Guards {
		var highest int64
		found := m.scan(g.Key, g.End, m.revision())
		for _, kv := range found {
			highest = max(highest, kv.ModRevision)
		}
		if highest != g.ModRevision || g.End != nil && int64(len(found)) != g.Count {
			return command.Result{Revision: m.revision(), Time: m.time, Conflict: true, FailedGuard: i}
		}
	}
	next, state := m.revision()+1, map[string]KV{}
	for k, kv := range m.states[next-1] {
		state[k] = kv
	}
	var events []watch.Event
	for _, o := range t.Ops {
		if o.Kind == command.OpPut {
			old := state[string(o.Key)]
			kv := KV{Key: o.Key, Value: o.Value, ModRevision: next, Version: old.Version + 1, CreateRevision: cmp.Or(old.CreateRevision, next)}
			state[string(o.Key)] = kv
			events = append(events, watch.Event{Type: watch.EventPut, KV: kv, PrevModRevision: old.ModRevision})
			continue
		}
		for _, kv := range m.scan(o.Key, o.End, next-1) {
			if _, live := state[string(kv.Key)]; live {
				delete(state, string(kv.Key))
				events = append(events, watch.Event{
					Type: watch.EventDelete, KV: KV{Key: kv.Key, ModRevision: next}, PrevModRevision: kv.ModRevision,
				})
			}
		}
	}
	if len(events) > 0 {
		m.states, m.events = append(m.states, state), append(m.events, events)
	}
	return command.Result{Revision: m.revision(), Time: m.time}
}

func (m *model) compact(revision int64) command.Result {
	r := command.Result{Revision: m.revision(), Time: m.time}
	switch {
	case revision <= m.floor:
		r.Refused = command.RefusedCompacted
	case revision > m.revision():
		r.Refused = command.RefusedFuture
	default:
		m.floor = revision
	}
	return r
}

package mvcc

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// program applies a Program to the model.
func (m *model) program(p *command.Program) command.Result {
	refused := func(why command.Refusal) command.Result {
		return command.Result{Revision: m.revision(), Time: m.time, Refused: why}
	}
	if p.Epoch != 0 && p.Epoch != m.epoch {
		return refused(command.RefusedEpoch)
	}
	now := m.states[m.revision()]
	x := &modelProgram{m: m, found: now, now: maps.Clone(now), leases: maps.Clone(m.leases), records: maps.Clone(m.records)}
	steps := x.steps(p.Steps)
	if x.refused != command.RefusedNot {
		return refused(x.refused)
	}
	if len(x.events) > 0 {
		m.states, m.events = append(m.states, x.now), append(m.events, x.events)
	}
	if x.set {
		m.epoch++
	}
	m.leases, m.records = x.leases, x.records
	return command.Result{Revision: m.revision(), Time: m.time, Steps: steps}
}

type modelProgram struct {
	m          *model
	found, now map[string]KV
	leases     map[int64]int64
	records    map[string][]byte
	set        bool
	events     []watch.Event
	refused    command.Refusal
}

// scan returns the keys of [key, end) among those in a state, in order.
func (x *modelProgram) scan(in map[string]KV, key, end []byte) []KV {
	m := model{states: []map[string]KV{in}}
	return m.scan(key, end, 0)
}

func (x *modelProgram) steps(steps []command.Step) []command.StepResult {
	out := []command.StepResult{}
	for i := range steps {
		r := x.step(&steps[i])
		if x.refused != command.RefusedNot {
			return nil
		}
		out = append(out, r)
	}
	return out
}

func (x *modelProgram) refuse(why command.Refusal) command.StepResult {
	x.refused = why
	return command.StepResult{}
}

func (x *modelProgram) step(st *command.Step) command.StepResult {
	r := command.StepResult{Kind: st.Kind}
	next := x.m.revision() + 1
	old, live := x.now[string(st.Key)]
	switch st.Kind {
	case command.StepRange:
		in := x.now
		switch rev := st.Range.Revision; {
		case rev >= next:
			return x.refuse(command.RefusedFuture)
		case rev != 0 && rev < x.m.floor:
			return x.refuse(command.RefusedCompacted)
		case rev != 0:
			in = x.m.states[rev]
		}
		o := st.Range
		o.Key, o.End = st.Key, st.End
		r.Range = expectRange(o, x.scan(in, st.Key, st.End))
	case command.StepPut:
		if _, known := x.leases[st.Lease]; st.Lease != 0 && !known {
			return x.refuse(command.RefusedLeaseNotFound)
		}
		if !live && (st.IgnoreValue || st.IgnoreLease) {
			return x.refuse(command.RefusedKeyNotFound)
		}
		if live && st.PrevKV {
			r.Range.KVs = []KV{old}
		}
		kv := KV{
			Key: st.Key, Value: st.Value, ModRevision: next, Version: old.Version + 1, Lease: st.Lease,
			CreateRevision: cmp.Or(old.CreateRevision, next),
		}
		if st.IgnoreValue {
			kv.Value = old.Value
		}
		if st.IgnoreLease {
			kv.Lease = old.Lease
		}
		x.now[string(st.Key)] = kv
		x.events = append(x.events, watch.Event{Type: watch.EventPut, KV: kv, PrevModRevision: x.found[string(st.Key)].ModRevision})
	case command.StepDelete:
		for _, kv := range x.scan(x.now, st.Key, st.End) {
			if st.PrevKV {
				r.Range.KVs = append(r.Range.KVs, kv)
			}
			x.remove(kv, &r)
		}
	case command.StepBranch:
		r.Succeeded = !slices.ContainsFunc(st.If, func(c command.Compare) bool { return !x.holds(c) })
		if r.Succeeded {
			r.Steps = x.steps(st.Then)
		} else {
			r.Steps = x.steps(st.Else)
		}
	case command.StepGrant:
		if _, known := x.leases[st.Lease]; known {
			return x.refuse(command.RefusedLeaseExists)
		}
		x.leases[st.Lease] = st.TTL
	case command.StepRevoke:
		if _, known := x.leases[st.Lease]; !known {
			return x.refuse(command.RefusedLeaseNotFound)
		}
		delete(x.leases, st.Lease)
		for _, kv := range x.scan(x.now, []byte{0}, []byte{0}) {
			if kv.Lease == st.Lease {
				x.remove(kv, &r)
			}
		}
	case command.StepSetRecord:
		x.records[string(st.Key)], x.set = st.Value, true
	case command.StepDeleteRecord:
		if _, there := x.records[string(st.Key)]; there {
			x.set = true
		}
		delete(x.records, string(st.Key))
	}
	return r
}

func (x *modelProgram) remove(kv KV, r *command.StepResult) {
	delete(x.now, string(kv.Key))
	r.Count++
	x.events = append(x.events, watch.Event{
		Type: watch.EventDelete, KV: KV{Key: kv.Key, ModRevision: x.m.revision() + 1}, PrevModRevision: x.found[string(kv.Key)].ModRevision,
	})
}

// holds reports whether c holds for the keys as they were before the program.
func (x *modelProgram) holds(c command.Compare) bool {
	kvs := x.scan(x.found, c.Key, c.End)
	if len(kvs) == 0 {
		if c.Target == command.CompareValue {
			return false
		}
		kvs = []KV{{}}
	}
	return !slices.ContainsFunc(kvs, func(kv KV) bool {
		got := bytes.Compare(kv.Value, c.Value)
		if c.Target != command.CompareValue {
			field := map[command.CompareTarget]int64{
				command.CompareVersion: kv.Version, command.CompareCreate: kv.CreateRevision, command.CompareMod: kv.ModRevision, command.CompareLease: kv.Lease,
			}[c.Target]
			got = cmp.Compare(field, c.Number)
		}
		return !map[command.CompareRelation]bool{
			command.CompareEqual: got == 0, command.CompareNotEqual: got != 0, command.CompareGreater: got > 0, command.CompareLess: got < 0,
		}[c.Relation]
	})
}

func (r *modelRun) program() command.Program {
	p := command.Program{Steps: r.steps(0, 1+r.rng.IntN(3))}
	switch r.rng.IntN(8) {
	case 0:
		p.Epoch = r.m.epoch
	case 1:
		p.Epoch = 1 + r.rng.Int64N(r.m.epoch)
	}
	return p
}

func (r *modelRun) steps(depth, n int) []command.Step {
	var steps []command.Step
	for range n {
		steps = append(steps, r.step(depth))
	}
	return steps
}

func (r *modelRun) step(depth int) command.Step {
	st := command.Step{Key: r.key()}
	if r.rng.IntN(2) == 0 {
		st.Key, st.End = r.span()
	}
	leases := []int64{1, 2, 3, -1}
	lease := leases[r.rng.IntN(len(leases))]
	switch n := r.rng.IntN(24); {
	case n < 4:
		st.Kind, st.Range = command.StepRange, r.rangeOptions()
		if r.rng.IntN(3) > 0 {
			st.Range.Revision = 0
		}
	case n < 12:
		st = command.Step{Kind: command.StepPut, Key: r.key(), PrevKV: r.rng.IntN(2) == 0}
		if st.IgnoreValue = r.rng.IntN(6) == 0; !st.IgnoreValue {
			st.Value = []byte(fmt.Sprintf("v%d", r.rng.IntN(1000)))[:r.rng.IntN(3)]
		}
		if st.IgnoreLease = r.rng.IntN(6) == 0; !st.IgnoreLease && r.rng.IntN(2) == 0 {
			st.Lease = lease
			if len(r.m.leases) > 0 && r.rng.IntN(4) > 0 {
				st.Lease = slices.Sorted(maps.Keys(r.m.leases))[0]
			}
		}
	case n < 15:
		st.Kind, st.PrevKV = command.StepDelete, r.rng.IntN(2) == 0
	case n < 17:
		return command.Step{Kind: command.StepGrant, Lease: lease, TTL: r.rng.Int64N(100)}
	case n < 18:
		return command.Step{Kind: command.StepRevoke, Lease: lease}
	case n < 19:
		return command.Step{Kind: command.StepSetRecord, Key: r.key(), Value: []byte(fmt.Sprint(r.rng.IntN(10)))}
	case n < 20:
		return command.Step{Kind: command.StepDeleteRecord, Key: r.key()}
	default:
		st = command.Step{Kind: command.StepBranch}
		if depth == 3 {
			return st
		}
		for range r.rng.IntN(3) {
			st.If = append(st.If, r.compare())
		}
		st.Then, st.Else = r.steps(depth+1, r.rng.IntN(3)), r.steps(depth+1, r.rng.IntN(3))
	}
	return st
}

// compare returns a random compare, which holds about half of the time.
func (r *modelRun) compare() command.Compare {
	c := command.Compare{Key: r.key(), Target: command.CompareTarget(r.rng.IntN(5)), Relation: command.CompareRelation(r.rng.IntN(4))}
	if r.rng.IntN(3) == 0 {
		c.Key, c.End = r.span()
	}
	if c.Target == command.CompareValue {
		c.Value = []byte("v")
	}
	for _, kv := range r.m.scan(c.Key, c.End, r.m.revision()) {
		switch c.Target {
		case command.CompareVersion:
			c.Number = kv.Version
		case command.CompareCreate:
			c.Number = kv.CreateRevision
		case command.CompareMod:
			c.Number = kv.ModRevision
		case command.CompareLease:
			c.Number = kv.Lease
		case command.CompareValue:
			c.Value = kv.Value
		}
	}
	return c
}

// checkBeside compares leases, named records and sizes, which have no history, with the model.
func (r *modelRun) checkBeside() {
	s := r.e.Snapshot()
	defer s.Close()
	require.Equal(r.t, r.m.epoch, s.Epoch())
	names := slices.Sorted(maps.Keys(r.m.records))
	all := s.Records(nil)
	require.Len(r.t, all, len(names))
	for i, name := range names {
		require.Equal(r.t, Record{Name: []byte(name), Value: r.m.records[name]}, all[i])
		value, ok := s.Record([]byte(name))
		require.True(r.t, ok)
		require.Equal(r.t, r.m.records[name], value)
	}
	leases, err := s.Leases()
	require.NoError(r.t, err)
	require.Len(r.t, leases, len(r.m.leases))
	for _, l := range leases {
		ttl, known := r.m.leases[l.ID]
		require.True(r.t, known)
		require.Equal(r.t, ttl, l.TTL)
		got, ok, err := s.Lease(l.ID)
		require.NoError(r.t, err)
		require.True(r.t, ok)
		require.Equal(r.t, l, got)
	}
	live, attached := int64(0), map[int64][][]byte{}
	for _, kv := range r.m.scan([]byte{0}, []byte{0}, r.m.revision()) {
		live += int64(len(kv.Key)+len(kv.Value)) + versionBytes
		if kv.Lease != 0 {
			attached[kv.Lease] = append(attached[kv.Lease], kv.Key)
		}
	}
	require.Equal(r.t, live, r.e.SizeInUse())
	require.GreaterOrEqual(r.t, r.e.Size(), live)
	for _, id := range []int64{1, 2, 3, -1} {
		keys, err := s.LeaseKeys(id)
		require.NoError(r.t, err)
		require.Equal(r.t, attached[id], keys)
	}
}

// checkHash checks that two engines, of which one has scrubbed more, return the same hashes.
func (r *modelRun) checkHash(other *Engine) {
	for revision := max(r.m.floor, 1); revision <= r.m.revision(); revision += 1 + r.rng.Int64N(20) {
		mine, err := r.e.HashKV(context.Background(), revision)
		require.NoError(r.t, err)
		theirs, err := other.HashKV(context.Background(), revision)
		require.NoError(r.t, err)
		require.Equal(r.t, mine, theirs)
		require.Equal(r.t, Hash{Hash: mine.Hash, Revision: revision, Current: r.m.revision(), CompactRevision: r.m.floor}, mine)
	}
	_, err := r.e.HashKV(context.Background(), r.m.revision()+1)
	require.ErrorIs(r.t, err, ErrFutureRevision)
}

package mvcc

import (
	"bytes"
	"encoding/binary"
)

// execution is one program being carried out: what it is going to change, none of which is written before its last step
// was found possible.
type execution struct {
	*stage
	wanted  bool
	first   int  // of its changes in stage.changes
	several bool // steps must see each other's changes
	refused Refusal
	leases  []leaseStep
	records []Record // set, or removed where the value is nil
}

// leaseStep grants a lease or revokes it.
type leaseStep struct {
	Lease
	revoked bool
}

// execute carries out a program.
func (s *stage) execute(p *Program, wanted bool) (Result, error) {
	x := execution{stage: s, wanted: wanted, first: len(s.changes)}
	if p.Epoch != 0 && p.Epoch != s.epoch {
		r := s.result()
		r.Refused = RefusedEpoch
		return r, nil
	}
	x.several = len(p.Steps) > 1 || len(p.Steps) == 1 && p.Steps[0].Kind == StepBranch
	steps, err := x.steps(p.Steps)
	s.own.clear()
	if err != nil {
		return Result{}, err
	}
	if x.refused != RefusedNot {
		clear(s.changes[x.first:])
		s.changes = s.changes[:x.first]
		r := s.result()
		r.Refused = x.refused
		return r, nil
	}
	if err := x.write(); err != nil {
		return Result{}, err
	}
	r := s.result()
	r.Steps = steps
	return r, nil
}

func (x *execution) write() error {
	s := x.stage
	if len(s.changes) > x.first {
		s.revision++
		if err := s.write(s.changes[x.first:]); err != nil {
			return err
		}
	}
	for _, l := range x.leases {
		if err := s.writeLease(l); err != nil {
			return err
		}
	}
	if len(x.records) == 0 {
		return nil
	}
	s.epoch++
	s.records = s.records.with(x.records)
	for _, r := range x.records {
		var err error
		if r.Value == nil {
			err = s.batch.Delete(recordKey(r.Name), nil)
		} else {
			err = s.batch.Set(recordKey(r.Name), r.Value, nil)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *stage) writeLease(l leaseStep) error {
	if l.revoked {
		delete(s.leases, l.ID)
		s.leaseChanges.Revoked = append(s.leaseChanges.Revoked, l.ID)
		return s.batch.Delete(leaseKey(tableLeases, l.ID), nil)
	}
	s.leases[l.ID] = l.TTL
	s.leaseChanges.Granted = append(s.leaseChanges.Granted, l.Lease)
	return s.batch.Set(leaseKey(tableLeases, l.ID), binary.AppendUvarint(nil, uint64(l.TTL)), nil)
}

// steps carries out steps until one is refused. The results are nil when nobody wants them.
func (x *execution) steps(steps []Step) (results []StepResult, err error) {
	if x.wanted {
		results = make([]StepResult, len(steps))
	}
	var unwanted StepResult
	for i := range steps {
		r := &unwanted
		if x.wanted {
			r = &results[i]
			r.Kind = steps[i].Kind
		}
		if err := x.step(&steps[i], r); err != nil || x.refused != RefusedNot {
			return nil, err
		}
	}
	return results, nil
}

func (x *execution) step(st *Step, r *StepResult) (err error) {
	switch st.Kind {
	case StepRange:
		return x.read(st, r)
	case StepPut:
		return x.put(st, r)
	case StepDelete:
		return x.delete(st, r)
	case StepBranch:
		if r.Succeeded, err = x.all(st.If); err != nil {
			return err
		}
		branch := st.Else
		if r.Succeeded {
			branch = st.Then
		}
		r.Steps, err = x.steps(branch)
		return err
	case StepGrant:
		if _, known := x.lease(st.Lease); known {
			x.refused = RefusedLeaseExists
			return nil
		}
		x.leases = append(x.leases, leaseStep{Lease: Lease{ID: st.Lease, TTL: st.TTL}})
	case StepRevoke:
		return x.revoke(st, r)
	case StepSetRecord:
		x.records = append(x.records, Record{Name: st.Key, Value: st.Value})
	case StepDeleteRecord:
		if x.hasRecord(st.Key) {
			x.records = append(x.records, Record{Name: st.Key})
		}
	}
	return nil
}

func (x *execution) read(st *Step, r *StepResult) (err error) {
	switch o := st.Range; {
	case o.Revision > x.revision:
		x.refused = RefusedFuture
	case o.Revision != 0 && o.Revision < x.floor:
		x.refused = RefusedCompacted
	case x.wanted:
		o.Key, o.End = st.Key, st.End
		r.Range, err = x.stage.read(o)
	}
	return err
}

func (x *execution) put(st *Step, r *StepResult) error {
	if st.Lease != 0 {
		if _, known := x.lease(st.Lease); !known {
			x.refused = RefusedLeaseNotFound
			return nil
		}
	}
	h, err := x.lookup(st.Key, x.several, st.IgnoreValue || st.PrevKV && x.wanted)
	if err != nil {
		return err
	}
	if !h.live() && (st.IgnoreValue || st.IgnoreLease) {
		x.refused = RefusedKeyNotFound
		return nil
	}
	if st.PrevKV && x.wanted {
		x.previous(st.Key, h, r)
	}
	value, lease := st.Value, st.Lease
	if st.IgnoreValue {
		value = bytes.Clone(h.value)
	}
	if st.IgnoreLease {
		lease = h.lease
	}
	x.change(x.putChange(st.Key, value, lease, h.version))
	return nil
}

// previous answers what a step replaced.
func (x *execution) previous(key []byte, h held, r *StepResult) {
	if h.live() {
		r.Range.KVs = append(r.Range.KVs, h.kv(key, false))
	}
}

func (x *execution) delete(st *Step, r *StepResult) error {
	if len(st.End) == 0 {
		h, err := x.lookup(st.Key, x.several, st.PrevKV && x.wanted)
		if err == nil && h.live() {
			x.remove(st.Key, h, st.PrevKV, r)
		}
		return err
	}
	if emptyRange(st.Key, st.End) {
		return nil
	}
	// What is removed is not laid over the keys before the scan is through.
	at := len(x.changes)
	err := x.scan(st.Key, st.End, x.several, func(key []byte, h held) (bool, error) {
		key = bytes.Clone(key)
		if st.PrevKV && x.wanted {
			x.previous(key, h, r)
		}
		x.changes = append(x.changes, x.deleteChange(key, h.version))
		r.Count++
		return len(x.changes)-x.first <= x.mostChanges, nil
	})
	if len(x.changes)-x.first > x.mostChanges {
		x.refused = RefusedTooMany
		return err
	}
	if x.several {
		for ; at < len(x.changes); at++ {
			x.overlay(at)
		}
	}
	return err
}

func (x *execution) remove(key []byte, h held, prev bool, r *StepResult) {
	if prev && x.wanted {
		x.previous(key, h, r)
	}
	r.Count++
	x.change(x.deleteChange(key, h.version))
}

func (x *execution) change(c change) {
	x.changes = append(x.changes, c)
	if len(x.changes)-x.first > x.mostChanges {
		x.refused = RefusedTooMany
	}
	if x.several {
		x.overlay(len(x.changes) - 1)
	}
}

// overlay shows a change to the steps that follow. What the program changed before it, it supersedes: only together do
// they replace what the key held before the program.
func (x *execution) overlay(at int) {
	c := &x.changes[at]
	if e := x.own.find(c.key); e != nil {
		earlier := &x.changes[e.change]
		earlier.superseded = true
		c.previous, c.releases = earlier.previous, 0
	}
	x.own.put(overlaid{key: c.key, held: held{version: c.now, value: c.value}, change: at})
}

// lease finds a lease as the steps so far left it.
func (x *execution) lease(id int64) (ttl int64, known bool) {
	for i := len(x.leases) - 1; i >= 0; i-- {
		if l := x.leases[i]; l.ID == id {
			return l.TTL, !l.revoked
		}
	}
	ttl, known = x.stage.leases[id]
	return ttl, known
}

func (x *execution) revoke(st *Step, r *StepResult) error {
	if _, known := x.lease(st.Lease); !known {
		x.refused = RefusedLeaseNotFound
		return nil
	}
	x.leases = append(x.leases, leaseStep{Lease: Lease{ID: st.Lease}, revoked: true})
	candidates, err := x.attached(st.Lease)
	if err != nil {
		return err
	}
	keys, before := make([][]byte, 0, len(candidates)), make([]held, 0, len(candidates))
	for _, key := range candidates {
		h, err := x.lookup(key, x.several, false)
		if err != nil {
			return err
		}
		if h.lease == st.Lease {
			keys, before = append(keys, key), append(before, h)
		}
	}
	if len(st.Value) > 0 && !bytes.Equal(st.Value, DigestKeys(keys)) {
		x.refused = RefusedEpoch
		return nil
	}
	for i, key := range keys {
		x.remove(key, before[i], false, r)
	}
	return nil
}

func (x *execution) hasRecord(name []byte) bool {
	for i := len(x.records) - 1; i >= 0; i-- {
		if bytes.Equal(x.records[i].Name, name) {
			return x.records[i].Value != nil
		}
	}
	_, found := x.stage.records.place(name)
	return found
}

package mvcc

import (
	"bytes"
	"encoding/binary"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// programRun applies one program. It collects the changes and writes them only after the last step, if no step was
// refused.
type programRun struct {
	*applier
	wantSteps   bool
	firstChange int  // position of the program's first change in applier.changes
	multiStep   bool // there are several steps, which have to see each other's changes
	refused     command.Refusal
	leases      []leaseChange
	records     []Record // named records to set, or to remove where Value is nil
}

// leaseChange is the grant of a lease, or, if revoked is true, its revocation.
type leaseChange struct {
	command.Lease
	revoked bool
}

// execute applies the program p. If wanted is true, the result contains the results of the steps.
func (s *applier) execute(p *command.Program, wanted bool) (command.Result, error) {
	x := programRun{applier: s, wantSteps: wanted, firstChange: len(s.changes)}
	if p.Epoch != 0 && p.Epoch != s.epoch && !mutant.On(mutant.StalePermission) {
		r := s.result()
		r.Refused = command.RefusedEpoch
		return r, nil
	}
	x.multiStep = len(p.Steps) > 1 || len(p.Steps) == 1 && p.Steps[0].Kind == command.StepBranch
	steps, err := x.steps(p.Steps)
	s.programOverlay.clear()
	if err != nil {
		return command.Result{}, err
	}
	if x.refused != command.RefusedNot {
		clear(s.changes[x.firstChange:])
		s.changes = s.changes[:x.firstChange]
		r := s.result()
		r.Refused = x.refused
		return r, nil
	}
	if err := x.write(); err != nil {
		return command.Result{}, err
	}
	r := s.result()
	r.Steps = steps
	return r, nil
}

// write writes the collected changes, leases and records to the batch.
func (x *programRun) write() error {
	s := x.applier
	if len(s.changes) > x.firstChange {
		s.revision++
		if err := s.write(s.changes[x.firstChange:]); err != nil {
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

// writeLease applies l to the leases in memory and in the batch.
func (s *applier) writeLease(l leaseChange) error {
	if l.revoked {
		delete(s.leases, l.ID)
		s.leaseChanges.Revoked = append(s.leaseChanges.Revoked, l.ID)
		return s.batch.Delete(leaseKey(tableLeases, l.ID), nil)
	}
	s.leases[l.ID] = l.TTL
	s.leaseChanges.Granted = append(s.leaseChanges.Granted, l.Lease)
	return s.batch.Set(leaseKey(tableLeases, l.ID), binary.AppendUvarint(nil, uint64(l.TTL)), nil)
}

// steps applies steps in order, until one is refused. If x.wantSteps is false, results is nil.
func (x *programRun) steps(steps []command.Step) (results []command.StepResult, err error) {
	if x.wantSteps {
		results = make([]command.StepResult, len(steps))
	}
	var unwanted command.StepResult
	for i := range steps {
		r := &unwanted
		if x.wantSteps {
			r = &results[i]
			r.Kind = steps[i].Kind
		}
		if err := x.step(&steps[i], r); err != nil || x.refused != command.RefusedNot {
			return nil, err
		}
	}
	return results, nil
}

// step applies one step and sets its result r. If the step cannot be carried out, it sets x.refused.
func (x *programRun) step(st *command.Step, r *command.StepResult) (err error) {
	switch st.Kind {
	case command.StepRange:
		return x.read(st, r)
	case command.StepPut:
		return x.put(st, r)
	case command.StepDelete:
		return x.delete(st, r)
	case command.StepBranch:
		if r.Succeeded, err = x.compareAll(st.If); err != nil {
			return err
		}
		branch := st.Else
		if r.Succeeded {
			branch = st.Then
		}
		r.Steps, err = x.steps(branch)
		return err
	case command.StepGrant:
		if _, known := x.lease(st.Lease); known {
			x.refused = command.RefusedLeaseExists
			return nil
		}
		x.leases = append(x.leases, leaseChange{Lease: command.Lease{ID: st.Lease, TTL: st.TTL}})
	case command.StepRevoke:
		return x.revoke(st, r)
	case command.StepSetRecord:
		x.records = append(x.records, Record{Name: st.Key, Value: st.Value})
	case command.StepDeleteRecord:
		if x.hasRecord(st.Key) {
			x.records = append(x.records, Record{Name: st.Key})
		}
	}
	return nil
}

// read applies a StepRange. It checks the revision even if the result is not needed: a refusal must be the same on all
// members.
func (x *programRun) read(st *command.Step, r *command.StepResult) (err error) {
	switch o := st.Range; {
	case o.Revision > x.revision:
		x.refused = command.RefusedFuture
	case o.Revision != 0 && o.Revision < x.compactRevision:
		x.refused = command.RefusedCompacted
	case x.wantSteps:
		o.Key, o.End = st.Key, st.End
		r.Range, err = x.applier.readRange(o)
	}
	return err
}

// put applies a StepPut: it adds the put to x.changes, or refuses the program.
func (x *programRun) put(st *command.Step, r *command.StepResult) error {
	if st.Lease != 0 {
		if _, known := x.lease(st.Lease); !known {
			x.refused = command.RefusedLeaseNotFound
			return nil
		}
	}
	h, err := x.lookup(st.Key, x.multiStep, st.IgnoreValue || st.PrevKV && x.wantSteps)
	if err != nil {
		return err
	}
	if !h.Live() && (st.IgnoreValue || st.IgnoreLease) {
		x.refused = command.RefusedKeyNotFound
		return nil
	}
	if st.PrevKV && x.wantSteps {
		x.addPrevious(st.Key, h, r)
	}
	value, lease := st.Value, st.Lease
	if st.IgnoreValue {
		value = bytes.Clone(h.value)
	}
	if st.IgnoreLease {
		lease = h.Lease
	}
	x.change(x.putChange(st.Key, value, lease, h.Meta))
	return nil
}

// addPrevious adds h, the version of key that a step replaces, to the step's result r. If the key did not exist, it
// adds nothing.
func (x *programRun) addPrevious(key []byte, h keyState, r *command.StepResult) {
	if h.Live() {
		r.Range.KVs = append(r.Range.KVs, h.kv(key, false))
	}
}

// delete applies a StepDelete: it adds a delete of each key to x.changes. If there are too many changes, it refuses the
// program.
func (x *programRun) delete(st *command.Step, r *command.StepResult) error {
	if len(st.End) == 0 {
		h, err := x.lookup(st.Key, x.multiStep, st.PrevKV && x.wantSteps)
		if err == nil && h.Live() {
			x.remove(st.Key, h, st.PrevKV, r)
		}
		return err
	}
	if command.EmptyRange(st.Key, st.End) {
		return nil
	}
	// Make the deletes visible to later reads only after the scan, because the scan must not read them.
	at := len(x.changes)
	err := x.scan(st.Key, st.End, x.multiStep, func(key []byte, h keyState) (bool, error) {
		key = bytes.Clone(key)
		if st.PrevKV && x.wantSteps {
			x.addPrevious(key, h, r)
		}
		x.changes = append(x.changes, x.deleteChange(key, h.Meta))
		r.Count++
		return len(x.changes)-x.firstChange <= x.maxChanges, nil
	})
	if len(x.changes)-x.firstChange > x.maxChanges {
		x.refused = command.RefusedTooMany
		return err
	}
	if x.multiStep {
		for ; at < len(x.changes); at++ {
			x.showChange(at)
		}
	}
	return err
}

// remove deletes key, whose current version is h. If prev is true and x wants results, it also adds h to the step's
// result r.
func (x *programRun) remove(key []byte, h keyState, prev bool, r *command.StepResult) {
	if prev && x.wantSteps {
		x.addPrevious(key, h, r)
	}
	r.Count++
	x.change(x.deleteChange(key, h.Meta))
}

// change adds c to x.changes. If the program then has more than maxChanges changes, it is refused.
func (x *programRun) change(c change) {
	x.changes = append(x.changes, c)
	if len(x.changes)-x.firstChange > x.maxChanges {
		x.refused = command.RefusedTooMany
	}
	if x.multiStep {
		x.showChange(len(x.changes) - 1)
	}
}

// showChange makes x.changes[at] visible to the later steps. If the program changed the same key before, it marks the
// earlier change as superseded. Compaction then treats both changes as one replacement of the version that existed
// before the program.
func (x *programRun) showChange(at int) {
	c := &x.changes[at]
	if e := x.programOverlay.find(c.key); e != nil {
		earlier := &x.changes[e.change]
		earlier.superseded = true
		c.prevModRevision, c.freedBytes = earlier.prevModRevision, 0
	}
	x.programOverlay.put(overlayEntry{key: c.key, keyState: keyState{Meta: c.after, value: c.value}, change: at})
}

// lease returns the TTL of the lease id, including the grants and revokes of earlier steps. If the lease does not
// exist, known is false.
func (x *programRun) lease(id int64) (ttl int64, known bool) {
	for i := len(x.leases) - 1; i >= 0; i-- {
		if l := x.leases[i]; l.ID == id {
			return l.TTL, !l.revoked
		}
	}
	ttl, known = x.applier.leases[id]
	return ttl, known
}

// revoke applies a StepRevoke: it deletes the lease and the keys attached to it, or refuses the program.
func (x *programRun) revoke(st *command.Step, r *command.StepResult) error {
	if _, known := x.lease(st.Lease); !known {
		x.refused = command.RefusedLeaseNotFound
		return nil
	}
	x.leases = append(x.leases, leaseChange{Lease: command.Lease{ID: st.Lease}, revoked: true})
	candidates, err := x.leaseKeys(st.Lease)
	if err != nil {
		return err
	}
	keys, before := make([][]byte, 0, len(candidates)), make([]keyState, 0, len(candidates))
	for _, key := range candidates {
		h, err := x.lookup(key, x.multiStep, false)
		if err != nil {
			return err
		}
		if h.Lease == st.Lease {
			keys, before = append(keys, key), append(before, h)
		}
	}
	if len(st.Value) > 0 && !bytes.Equal(st.Value, command.DigestKeys(keys)) {
		x.refused = command.RefusedEpoch
		return nil
	}
	for i, key := range keys {
		x.remove(key, before[i], false, r)
	}
	return nil
}

// hasRecord reports whether a named record exists after the changes of the earlier steps.
func (x *programRun) hasRecord(name []byte) bool {
	for i := len(x.records) - 1; i >= 0; i-- {
		if bytes.Equal(x.records[i].Name, name) {
			return x.records[i].Value != nil
		}
	}
	_, found := x.applier.records.search(name)
	return found
}

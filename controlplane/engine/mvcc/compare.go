package mvcc

import (
	"bytes"
	"cmp"
	"slices"
)

// all reports whether all of compares hold. They see the keys as the program found them, not what its steps have changed:
// etcd chooses all branches before it writes.
func (x *programRun) compareAll(compares []Compare) (bool, error) {
	for i := range compares {
		holds, err := x.compare(&compares[i])
		if err != nil || !holds {
			return false, err
		}
	}
	return true, nil
}

func (x *programRun) compare(c *Compare) (bool, error) {
	if len(c.End) == 0 {
		h, err := x.lookup(c.Key, false, c.Target == CompareValue)
		if err != nil {
			return false, err
		}
		return c.holds(h), nil
	}
	found, holds := false, true
	var err error
	if !EmptyRange(c.Key, c.End) {
		err = x.scan(c.Key, c.End, false, func(_ []byte, h keyState) (bool, error) {
			found, holds = true, c.holds(h)
			return holds, nil
		})
	}
	if !found {
		holds = c.holds(keyState{})
	}
	return holds, err
}

// holds compares one key; the zero version is one that does not exist.
func (c *Compare) holds(h keyState) bool {
	var order int
	switch c.Target {
	case CompareVersion:
		order = cmp.Compare(h.Version, c.Number)
	case CompareCreate:
		order = cmp.Compare(h.CreateRevision, c.Number)
	case CompareMod:
		order = cmp.Compare(h.ModRevision, c.Number)
	case CompareLease:
		order = cmp.Compare(h.Lease, c.Number)
	case CompareValue:
		if !h.Live() {
			return false
		}
		order = bytes.Compare(h.value, c.Value)
	}
	switch c.Relation {
	case CompareEqual:
		return order == 0
	case CompareNotEqual:
		return order != 0
	case CompareGreater:
		return order > 0
	default:
		return order < 0
	}
}

// attached returns the keys of a lease, in order, as the steps so far left them, and perhaps keys that it has lost.
func (x *programRun) leaseKeys(id int64) ([][]byte, error) {
	keys, err := readLeaseKeys(x.db, id)
	if err != nil {
		return nil, err
	}
	stored := len(keys)
	for _, o := range []*overlay{&x.batchOverlay, &x.programOverlay} {
		for i := range o.entries {
			if e := &o.entries[i]; o.leased && e.Lease == id {
				keys = append(keys, e.key)
			}
		}
	}
	if len(keys) > stored {
		slices.SortFunc(keys, bytes.Compare)
		keys = slices.CompactFunc(keys, bytes.Equal)
	}
	return keys, nil
}

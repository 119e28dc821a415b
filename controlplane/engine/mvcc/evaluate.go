package mvcc

import (
	"bytes"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// compareAll reports whether all compares hold. They see the keys as they were before the program, since etcd chooses
// all branches before it writes.
func (x *programRun) compareAll(compares []command.Compare) (bool, error) {
	for i := range compares {
		holds, err := x.compare(&compares[i])
		if err != nil || !holds {
			return false, err
		}
	}
	return true, nil
}

// compare reports whether the condition c holds for its key, or for all keys of its range.
func (x *programRun) compare(c *command.Compare) (bool, error) {
	if len(c.End) == 0 {
		h, err := x.lookup(c.Key, false, c.Target == command.CompareValue)
		if err != nil {
			return false, err
		}
		return c.Holds(h.Meta, h.value), nil
	}
	found, holds := false, true
	var err error
	if !command.EmptyRange(c.Key, c.End) {
		err = x.scan(c.Key, c.End, false, func(_ []byte, h keyState) (bool, error) {
			found, holds = true, c.Holds(h.Meta, h.value)
			return holds, nil
		})
	}
	if !found {
		holds = c.Holds(command.Meta{}, nil)
	}
	return holds, err
}

// leaseKeys returns the keys of the lease id, in order. It includes the keys that earlier commands of the batch and
// earlier steps of the program attached. Some keys may no longer be attached, so the caller must look up each of them.
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

package command

import (
	"bytes"
)

// KV is a key with its value and metadata at some revision.
type KV struct {
	Key, Value     []byte
	CreateRevision int64 // revision that created the key
	ModRevision    int64 // revision that wrote this value
	Version        int64 // number of puts since the key was created, including the one that created it
	Lease          int64 // lease that the key is attached to; 0: none
}

// Meta is the metadata of a version of a key. The zero Meta means that the key does not exist.
type Meta struct {
	CreateRevision, ModRevision, Version int64

	Lease int64 // lease that the key is attached to; 0: none
	Size  int64 // size of the value, bytes
}

// Live reports whether the key exists.
func (v Meta) Live() bool { return v.ModRevision != 0 }

// RangeOptions selects the keys that a range reads and what it returns of them.
type RangeOptions struct {
	Key, End  []byte // [Key, End); without End: Key alone; with End {0}: all keys from Key on
	Revision  int64  // revision to read at; 0: the newest one
	Limit     int    // maximum number of keys; 0: no limit
	MaxBytes  int    // stop after the key with which keys and values reach this number of bytes; 0: no limit
	Reverse   bool   // from the last key to the first
	KeysOnly  bool   // leave values nil
	WantCount bool   // count the whole range, not only the returned keys
	CountOnly bool   // like WantCount, but return no keys
}

// RangeResult is the result of a range.
type RangeResult struct {
	KVs  []KV
	More bool // Limit or MaxBytes left keys out

	// Count is the number of keys in KVs, and MaxModRevision the highest of their mod revisions. With WantCount or
	// CountOnly, both are those of the whole range.
	Count          int64
	MaxModRevision int64
}

// Guard returns a guard for the read with the options o that returned r, at the current revision. The guard fails if a
// later write changes what this read returns. It covers the keys that r.Count counts.
func (o RangeOptions) Guard(r RangeResult) Guard {
	g := Guard{Key: o.Key, End: o.End, ModRevision: r.MaxModRevision}
	if len(o.End) == 0 {
		return g
	}
	g.Count = r.Count
	if r.More && !o.WantCount && len(r.KVs) > 0 {
		last := r.KVs[len(r.KVs)-1].Key
		if o.Reverse {
			g.Key = last
		} else {
			g.End = append(bytes.Clone(last), 0)
		}
	}
	return g
}

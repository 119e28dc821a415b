package command

import (
	"bytes"
)

// KV is a key with the value it has, or had, at some revision.
type KV struct {
	Key, Value     []byte
	CreateRevision int64 // that put the key when it did not exist
	ModRevision    int64 // that put this value
	Version        int64 // puts since and with the creation
	Lease          int64 // 0: none
}

// version is what a key's newest version says of it; the zero version is a key that does not exist.
type Meta struct {
	CreateRevision, ModRevision, Version int64

	Lease int64 // 0: none
	Size  int64 // of the value, bytes
}

func (v Meta) Live() bool { return v.ModRevision != 0 }

// RangeOptions says what Range reads.
type RangeOptions struct {
	Key, End  []byte // [Key, End); no End: Key alone; End {0}: all from Key on
	Revision  int64  // 0: the snapshot's
	Limit     int    // most keys; 0: no limit
	MaxBytes  int    // stop after the key that brings keys and values to this; 0: no limit
	Reverse   bool   // from the last key to the first
	KeysOnly  bool   // values stay nil
	WantCount bool   // count the whole range, not only the keys returned
	CountOnly bool   // WantCount, and return no keys
}

// RangeResult is what Range found.
type RangeResult struct {
	KVs  []KV
	More bool // Limit or MaxBytes left keys out

	// Count and the highest mod revision of the keys in KVs, or of the whole range with WantCount or CountOnly.
	Count          int64
	MaxModRevision int64
}

// Guard is the guard that fails once r, read with o at the current revision, has changed. It covers what Count covers.
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

package mvcc

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// A mark says all of a version but its lease, or only when it was written.
func TestMark(t *testing.T) {
	const far = 1 << 40
	for name, c := range map[string]struct {
		v       Meta
		partial bool
	}{
		"young":                  {Meta{CreateRevision: 7, ModRevision: 7, Version: 1}, false},
		"at far revisions":       {Meta{CreateRevision: far, ModRevision: far + 9, Version: 3, Size: 8 << 20}, false},
		"oldest that fits":       {Meta{CreateRevision: 1, ModRevision: 1 + math.MaxUint32, Version: math.MaxUint32, Size: math.MaxUint32 - 1}, false},
		"created too long ago":   {Meta{CreateRevision: 1, ModRevision: 2 + math.MaxUint32, Version: 1}, true},
		"put too often":          {Meta{CreateRevision: 1, ModRevision: far, Version: 1 + math.MaxUint32}, true},
		"put too often, lately":  {Meta{CreateRevision: far, ModRevision: far, Version: 1 + math.MaxUint32}, true},
		"of an impossible value": {Meta{CreateRevision: 1, ModRevision: 1, Version: 1, Size: math.MaxUint32}, true},
		"leased":                 {Meta{CreateRevision: 1, ModRevision: 1, Version: 1, Lease: 5}, true},
	} {
		m := c.v.entry()
		require.True(t, m.Live(), name)
		require.Equal(t, c.v.ModRevision, m.ModRevision(), name)
		require.Equal(t, c.partial, m.Partial(), name)
		if !c.partial {
			require.Equal(t, c.v, m.Meta(), name)
		}
	}
	require.Equal(t, Entry{}, Meta{}.entry())
	require.False(t, Entry{}.Live())
}

// A start reads no large values for its index. What is put over them, deleted and counted then is as if it had.
func TestStartLeavesLargeValues(t *testing.T) {
	fs := vfs.NewMem()
	open := func() *Engine {
		e, err := Open(fs, "data", Options{KeyIndex: true})
		require.NoError(t, err)
		require.NoError(t, e.AwaitKeyIndex(context.Background()))
		return e
	}
	e := open()
	const keys = 20
	large := string(bytes.Repeat([]byte("large "), unreadBytes))
	key := func(i int) string { return fmt.Sprintf("key/%02d", i) }
	index := uint64(0)
	apply := func(key, value string) {
		index++
		mustApply(t, e, put(t, index, key, value))
	}
	for i := range keys {
		apply(key(i), "small")
		apply(key(i), large)
	}
	_, err := e.Flush(context.Background())
	require.NoError(t, err)
	before := e.published.Load().state
	require.NoError(t, e.Close())

	e = open()
	defer func() { require.NoError(t, e.Close()) }()
	unread := 0
	for i := range keys {
		if m, ok := e.published.Load().index.Find([]byte(key(i))); ok && m.Partial() {
			unread++
		}
	}
	require.Equal(t, keys, unread)
	require.Equal(t, before, e.published.Load().state)
	apply(key(0), large+"!")
	index++
	data, err := EncodeTxn(Txn{Ops: []Op{Delete([]byte(key(1)))}})
	require.NoError(t, err)
	mustApply(t, e, Command{Index: index, Data: data})

	after := e.published.Load().state
	require.Equal(t, before.live+1-Meta{Size: int64(len(large))}.storedBytes([]byte(key(1))), after.live)
	s := e.Snapshot()
	defer s.Close()
	kv, ok, err := s.Get([]byte(key(0)))
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, [2]int64{2, 3}, [2]int64{kv.CreateRevision, kv.Version})
	m, ok := s.index.Find([]byte(key(0)))
	require.True(t, ok)
	require.False(t, m.Partial(), "the put has read it")
	res, err := s.Range(RangeOptions{Key: []byte{0}, End: []byte{0}, CountOnly: true})
	require.NoError(t, err)
	require.Equal(t, int64(keys-1), res.Count)
	require.Equal(t, s.Revision()-1, res.MaxModRevision)
}

package mvcc

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// FuzzKeys checks that encoded keys sort like keys, decode to the same keys, and satisfy Pebble's rules for comparers.
func FuzzKeys(f *testing.F) {
	f.Add([]byte("a"), []byte("a\x00"), int64(1), int64(2))
	f.Add([]byte("a\x00\x01"), []byte("a\x00\xff"), int64(1), int64(1<<40))
	f.Add([]byte{}, []byte{0, 1, 0, 1}, int64(1), int64(1))
	f.Fuzz(func(t *testing.T, a, b []byte, ra, rb int64) {
		if ra < 1 || rb < 1 {
			return
		}
		pa, pb := appendPrefix(nil, a), appendPrefix(nil, b)
		require.Equal(t, bytes.Compare(a, b), bytes.Compare(pa, pb))
		require.Len(t, pa, prefixLen(a))
		back, err := appendUserKey(nil, pa)
		require.NoError(t, err)
		require.True(t, bytes.Equal(a, back))

		va, vb := appendVersionKey(nil, a, ra), appendVersionKey(nil, b, rb)
		c := comparer()
		require.Equal(t, cmp.Or(bytes.Compare(a, b), cmp.Compare(rb, ra)), c.Compare(va, vb))
		require.Equal(t, len(pa), c.Split(va))
		require.Equal(t, len(pa), c.Split(pa))
		require.Negative(t, c.Compare(pa, va))
		prefix, revision, err := splitVersion(va)
		require.NoError(t, err)
		require.Equal(t, pa, prefix)
		require.Equal(t, ra, revision)

		next := c.ImmediateSuccessor(nil, pa)
		require.Equal(t, len(next), c.Split(next))
		require.Positive(t, c.Compare(next, va))
		if bytes.Compare(a, b) < 0 {
			require.LessOrEqual(t, c.Compare(next, pb), 0)
		}
		if c.Compare(va, vb) < 0 {
			sep := c.Separator(nil, va, vb)
			require.LessOrEqual(t, c.Compare(va, sep), 0)
			require.Negative(t, c.Compare(sep, vb))
			require.LessOrEqual(t, c.Compare(pa, sep[:c.Split(sep)]), 0)
			require.LessOrEqual(t, c.Compare(sep[:c.Split(sep)], pb), 0)
		}
		require.GreaterOrEqual(t, c.Compare(c.Successor(nil, va), va), 0)

		// PrefixEnd returns the end of the range of keys that begin with a.
		if len(a) > 0 {
			require.Equal(t, bytes.HasPrefix(b, a), command.InRange(b, a, command.PrefixEnd(a)))
		}
	})
}

// TestUnknownCommands checks that Apply returns a final error for a command that it cannot decode, and applies nothing
// of its batch.
func TestUnknownCommands(t *testing.T) {
	valid, err := command.EncodeTxn(command.Txn{Ops: []command.Op{command.Put([]byte("a"), []byte("1"))}})
	require.NoError(t, err)
	twice := slices.Concat(valid[:4], []byte{2}, valid[5:], valid[5:])
	for name, c := range map[string]struct {
		data []byte
		want error
	}{
		"newer command format":              {[]byte{2, byte(command.KindTxn), 0, 0, 0}, command.ErrUnknownFormat},
		"newer command kind":                {[]byte{1, 99}, command.ErrUnknownFormat},
		"no kind":                           {[]byte{1}, command.ErrMalformed},
		"truncated transaction":             {valid[:len(valid)-1], command.ErrMalformed},
		"trailing byte after a transaction": {append(bytes.Clone(valid), 0), command.ErrMalformed},
		"a key put twice":                   {twice, command.ErrMalformed},
		"trailing byte after a revision":    {append(command.EncodeCompact(1), 0), command.ErrMalformed},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t)
			mustApply(t, e, put(t, 1, "a", "0"))
			_, err := e.Apply([]command.Command{put(t, 2, "a", "1"), {Index: 3, Data: c.data}, put(t, 4, "a", "2")})
			require.ErrorIs(t, err, c.want)
			var fatal *CommandError
			require.ErrorAs(t, err, &fatal)
			require.Equal(t, uint64(3), fatal.Index)
			require.Equal(t, "a=0 ", content(t, e))
			require.Equal(t, uint64(1), e.Applied().Index)
			_, again := e.Apply([]command.Command{put(t, 2, "a", "1")})
			require.Equal(t, err, again)
		})
	}
	e := newEngine(t)
	mustApply(t, e, put(t, 5, "a", "0"))
	_, err = e.Apply([]command.Command{put(t, 5, "a", "1")})
	require.ErrorContains(t, err, "command at index 5 after 5 was applied")
}

// TestOldFormat checks that a database of format 1, with a change list for each revision and without sizes, can be
// watched, changed and scrubbed.
func TestOldFormat(t *testing.T) {
	e := newEngine(t)
	db := e.published.Load().gen.db
	set := func(key, value []byte) { require.NoError(t, db.Set(key, value, pebble.NoSync)) }
	list := func(kind command.OpKind, key string, age byte) []byte {
		return append(append([]byte{byte(kind), byte(len(key))}, key...), age)
	}
	set(appendVersionKey(nil, []byte("a"), 2), append(appendVersionHeader(nil, command.Meta{CreateRevision: 2, ModRevision: 2, Version: 1}), "old"...))
	set(appendVersionKey(nil, []byte("a"), 3), append(appendVersionHeader(nil, command.Meta{CreateRevision: 2, ModRevision: 3, Version: 2}), "new"...))
	set(appendVersionKey(nil, []byte("b"), 2), appendVersionHeader(nil, command.Meta{CreateRevision: 2, ModRevision: 2, Version: 1}))
	set(appendVersionKey(nil, []byte("b"), 4), []byte{recordTombstone})
	set(changesKey(2, 0), append(list(command.OpPut, "a", 0), list(command.OpPut, "b", 0)...))
	set(changesKey(3, 0), list(command.OpPut, "a", 1))
	set(changesKey(4, 0), list(command.OpDelete, "b", 2))
	state := []byte{oldStateFormat, 9, 1, 4, 0, 0, 1, 0} // index 9, term 1, revision 4, compact revision 0, time 0, 1 key, no proposals
	s, err := decodeState(state)
	require.NoError(t, err)
	require.Equal(t, int64(1), s.epoch)
	e.applier.state = s
	e.published.Store(&view{gen: e.published.Load().gen, state: s})
	e.hub.Restore(s.revision)

	w := e.Watch(watch.Options{Key: []byte{0}, End: []byte{0}, FromRevision: 2})
	defer w.Close()
	mustApply(t, e, put(t, 10, "a", "newer"))
	var seen []string
	for len(seen) < 5 {
		b, err := w.Next(context.Background())
		require.NoError(t, err)
		for _, ev := range b.Events {
			seen = append(seen, fmt.Sprintf("%s@%d", ev.KV.Key, ev.KV.ModRevision))
		}
	}
	require.Equal(t, []string{"a@2", "b@2", "a@3", "b@4", "a@5"}, seen)
	mustApply(t, e, command.Command{Index: 11, Data: command.EncodeCompact(5)})
	done, err := e.Scrub(context.Background(), 100)
	require.NoError(t, err)
	require.True(t, done)
	require.Equal(t, "key a revision 5: newer\nkey a revision 3: new\nrevision 5:\n  put a after 3 releases 36\n", dump(t, e))
}

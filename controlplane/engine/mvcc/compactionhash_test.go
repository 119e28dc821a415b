package mvcc

import (
	"context"
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

func openWithHashes(t *testing.T) *Engine {
	e, err := Open(vfs.NewMem(), "data", Options{HashOnCompact: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	return e
}

func compactAt(t *testing.T, e *Engine, revision int64) {
	t.Helper()
	require.Equal(t, command.RefusedNot, mustApply(t, e, command.Command{Index: e.Applied().Index + 1, Data: command.EncodeCompact(revision)})[0].Refused)
	e.builders.Wait()
}

func scrubAll(t *testing.T, e *Engine) {
	t.Helper()
	for done := false; !done; {
		var err error
		done, err = e.Scrub(context.Background(), 1000)
		require.NoError(t, err)
	}
}

// TestCompactionHashes checks that HashKV returns, for a compacted revision, the hash from before the compaction, until
// ten later ones were computed.
func TestCompactionHashes(t *testing.T) {
	ctx := t.Context()
	e, forgets := openWithHashes(t), newEngine(t)
	for i := range uint64(40) {
		for _, e := range []*Engine{e, forgets} {
			mustApply(t, e, put(t, i+1, fmt.Sprintf("key/%d", i%3), fmt.Sprint(i)))
		}
	}
	before, err := e.HashKV(ctx, 10)
	require.NoError(t, err)
	for _, e := range []*Engine{e, forgets} {
		compactAt(t, e, 10)
		scrubAll(t, e)
		require.NoError(t, e.Defragment(ctx))
	}
	after, err := e.HashKV(ctx, 10)
	require.NoError(t, err)
	require.Equal(t, before, after)
	left, err := forgets.HashKV(ctx, 10)
	require.NoError(t, err)
	require.NotEqual(t, before.Hash, left.Hash, "without stored hashes, HashKV hashes only the versions that are left")
	require.EqualValues(t, 10, left.CompactRevision)
	require.Empty(t, forgets.CompactionHashes())

	for r := int64(11); r < 21; r++ {
		compactAt(t, e, r)
	}
	all := e.CompactionHashes()
	require.Len(t, all, 10)
	require.Equal(t, Hash{Hash: all[0].Hash, Revision: 20, Current: 41, CompactRevision: 19}, all[0])
	_, ok := e.CompactionHash(10)
	require.False(t, ok)
	_, err = e.HashKV(ctx, 10)
	require.ErrorIs(t, err, ErrCompacted)
	old, err := e.HashKV(ctx, 11)
	require.NoError(t, err, "the hash from before the compaction is stored")
	require.EqualValues(t, 10, old.CompactRevision)

	// Restore drops the hashes of the replaced history.
	_, err = forgets.Checkpoint(ctx, "copy")
	require.NoError(t, err)
	_, err = e.Checkpoint(ctx, "copy")
	require.NoError(t, err)
	require.NoError(t, e.Restore("copy"))
	require.Empty(t, e.CompactionHashes())
}

// TestScrubWaitsForTheHash checks that Scrub keeps the data that a running hash computation still has to read, and that
// at most two computations are under way at a time.
func TestScrubWaitsForTheHash(t *testing.T) {
	ctx := t.Context()
	e := openWithHashes(t)
	for i := range uint64(20) {
		mustApply(t, e, put(t, i+1, "a", fmt.Sprint(i)))
	}
	want, err := e.HashKV(ctx, 15)
	require.NoError(t, err)
	r := &e.published.Load().gen.hashes
	r.computing.Lock()
	mustApply(t, e, command.Command{Index: 30, Data: command.EncodeCompact(15)})
	scrubAll(t, e)
	ended, cancel := context.WithCancel(ctx)
	cancel()
	require.ErrorIs(t, e.AwaitScrub(ended, 15), context.Canceled)
	r.computing.Unlock()
	e.builders.Wait()
	got, err := e.HashKV(ctx, 15)
	require.NoError(t, err)
	require.Equal(t, want, got)
	scrubAll(t, e)
	require.NoError(t, e.AwaitScrub(ended, 15))

	// At most two computations run at a time: the third compaction is not hashed.
	r.computing.Lock()
	for i, revision := range []int64{16, 17, 18} {
		mustApply(t, e, command.Command{Index: 31 + uint64(i), Data: command.EncodeCompact(revision)})
	}
	r.computing.Unlock()
	e.builders.Wait()
	_, ok := e.CompactionHash(17)
	require.True(t, ok)
	_, ok = e.CompactionHash(18)
	require.False(t, ok)
}

// TestHashesReadInProportionToWrites checks that a compaction of a large keyspace is not hashed if little was written
// since the last hash.
func TestHashesReadInProportionToWrites(t *testing.T) {
	e := openWithHashes(t)
	index := uint64(0)
	write := func(key string, n int) {
		index = e.Applied().Index + 1
		mustApply(t, e, put(t, index, key, string(make([]byte, n))))
	}
	for i := range 17 {
		write(fmt.Sprint("large/", i), 1<<20)
	}
	compactAt(t, e, e.Revision())
	require.Len(t, e.CompactionHashes(), 1)
	write("a", 1)
	compactAt(t, e, e.Revision())
	require.Len(t, e.CompactionHashes(), 1)
	write("large/1", 1<<20)
	write("large/2", 1<<20)
	compactAt(t, e, e.Revision())
	require.Len(t, e.CompactionHashes(), 2)
}

// TestAHashInPieces checks that the hash does not depend on where its steps end, which Scrub changes.
func TestAHashInPieces(t *testing.T) {
	ctx := t.Context()
	one, two := newEngine(t), newEngine(t)
	for _, e := range []*Engine{one, two} {
		var cmds []command.Command
		for i := range uint64(3 * hashVersions) {
			cmds = append(cmds, put(t, i+1, fmt.Sprintf("key/%d", i%1500), fmt.Sprint(i)))
		}
		mustApply(t, e, cmds...)
		compactAt(t, e, 2*hashVersions)
	}
	scrubAll(t, two)
	for _, revision := range []int64{2 * hashVersions, 2*hashVersions + 700, 0} {
		a, err := one.HashKV(ctx, revision)
		require.NoError(t, err)
		b, err := two.HashKV(ctx, revision)
		require.NoError(t, err)
		require.Equal(t, a, b)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	_, err := one.HashKV(ended, 0)
	require.ErrorIs(t, err, context.Canceled)
}

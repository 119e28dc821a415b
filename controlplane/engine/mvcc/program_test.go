package mvcc

import (
	"context"
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// program returns a command that applies steps and requests their results.
func program(t *testing.T, index uint64, steps ...command.Step) command.Command {
	data, err := command.EncodeProgram(command.Program{Steps: steps})
	require.NoError(t, err)
	return command.Command{Index: index, Term: 1, Data: data, WantSteps: true}
}

// TestSharedIndex checks that commands with the same index must be passed to one call of Apply, and that a program
// which reads at a revision must not share its index.
func TestSharedIndex(t *testing.T) {
	fs := vfs.NewMem()
	e := mustOpen(t, fs)
	putA := func(index uint64, value string) command.Command {
		return program(t, index, command.Step{Kind: command.StepPut, Key: []byte("a"), Value: []byte(value)})
	}
	read := program(t, 3, command.Step{Kind: command.StepRange, Key: []byte("a"), Range: RangeOptions{Revision: 3}})
	results, err := e.Apply([]command.Command{putA(2, "1"), putA(2, "2"), putA(2, "3"), read, putA(4, "4"), putA(4, "5")})
	require.NoError(t, err)
	require.Equal(t, []int64{2, 3, 4, 4, 5, 6}, func() (out []int64) {
		for _, r := range results {
			out = append(out, r.Revision)
		}
		return out
	}())
	require.Equal(t, "2", string(results[3].Steps[0].Range.KVs[0].Value), "a read that is alone at its index sees a revision made by the same Apply")
	require.Equal(t, command.Position{Index: 4, Term: 1}, e.Applied())
	_, err = e.Apply([]command.Command{putA(4, "6")})
	require.ErrorIs(t, err, command.ErrInvalid)
	require.NoError(t, e.Close())

	e = mustOpen(t, fs)
	read.Index = 7
	_, err = e.Apply([]command.Command{putA(6, "7"), putA(7, "8"), read})
	require.ErrorIs(t, err, command.ErrInvalid, "a read at a revision must not share its index")
	require.NoError(t, e.Close())
}

// TestOnLeases checks that Options.OnLeases is called when lease changes can already be read, and after a restore.
func TestOnLeases(t *testing.T) {
	fs := vfs.NewMem()
	var heard []LeaseChanges
	var e *Engine
	e, err := Open(fs, "data", Options{Quiet: true, OnLeases: func(c LeaseChanges) {
		heard = append(heard, c)
		s := e.Snapshot()
		defer s.Close()
		for _, l := range c.Granted {
			_, ok, err := s.Lease(l.ID)
			require.NoError(t, err)
			require.True(t, ok)
		}
	}})
	require.NoError(t, err)
	defer func() { require.NoError(t, e.Close()) }()
	grant := func(id int64) command.Step { return command.Step{Kind: command.StepGrant, Lease: id, TTL: 5} }
	revoke := func(id int64) command.Step { return command.Step{Kind: command.StepRevoke, Lease: id} }
	mustApply(t, e, program(t, 1, grant(1)), program(t, 2, grant(2)), program(t, 3, grant(1)))
	mustApply(t, e, program(t, 4, command.Step{Kind: command.StepPut, Key: []byte("a")}))
	_, err = e.Checkpoint(context.Background(), "copy")
	require.NoError(t, err)
	mustApply(t, e, program(t, 5, revoke(1)), program(t, 6, grant(3), revoke(4)))
	require.NoError(t, e.Restore("copy"))
	require.Equal(t, []LeaseChanges{
		{Granted: []command.Lease{{ID: 1, TTL: 5}, {ID: 2, TTL: 5}}}, {Revoked: []int64{1}}, {All: true},
	}, heard)
	// Restore also replaced the leases that later commands use.
	require.Equal(t, command.RefusedLeaseExists, mustApply(t, e, program(t, 7, grant(1)))[0].Refused)
}

// TestRevokeOfCertainKeys checks that a StepRevoke with a digest is refused if the lease's keys have changed.
func TestRevokeOfCertainKeys(t *testing.T) {
	e := newEngine(t)
	a, b := []byte("a"), []byte("b")
	revoke := func(lease int64, keys ...[]byte) command.Step {
		return command.Step{Kind: command.StepRevoke, Lease: lease, Value: command.DigestKeys(keys)}
	}
	index := uint64(0)
	apply := func(steps ...command.Step) command.Refusal {
		t.Helper()
		index++
		return mustApply(t, e, program(t, index, steps...))[0].Refused
	}
	require.Equal(t, command.RefusedNot, apply(command.Step{Kind: command.StepGrant, Lease: 7, TTL: 9}, command.Step{Kind: command.StepPut, Key: a, Lease: 7}, command.Step{Kind: command.StepPut, Key: b, Lease: 7}))
	require.Equal(t, command.RefusedEpoch, apply(revoke(7)))
	require.Equal(t, command.RefusedEpoch, apply(revoke(7, a)))
	require.Equal(t, command.RefusedEpoch, apply(revoke(7, a, []byte("bb"))))
	require.Equal(t, "a= b= ", content(t, e))
	require.Equal(t, command.RefusedNot, apply(command.Step{Kind: command.StepPut, Key: b}), "a put without a lease detaches b from its lease")
	require.Equal(t, command.RefusedEpoch, apply(revoke(7, a, b)))
	// Changes by earlier steps and by earlier commands of the batch are included.
	require.Equal(t, command.RefusedEpoch, apply(command.Step{Kind: command.StepPut, Key: b, Lease: 7}, revoke(7, a)))
	both := []command.Command{program(t, index+1, command.Step{Kind: command.StepPut, Key: b, Lease: 7}), program(t, index+2, revoke(7, a))}
	index += 2
	require.Equal(t, command.RefusedEpoch, mustApply(t, e, both...)[1].Refused)
	require.Equal(t, command.RefusedNot, apply(command.Step{Kind: command.StepPut, Key: b}, revoke(7, a)))
	require.Equal(t, "b= ", content(t, e))
	require.Equal(t, command.RefusedLeaseNotFound, apply(revoke(7)))
}

// TestAwaitScrub checks that AwaitScrub waits until the data is removed, which open snapshots prevent, and that the
// last version survives Defragment.
func TestAwaitScrub(t *testing.T) {
	e := newEngine(t)
	for i := range uint64(20) {
		mustApply(t, e, put(t, i+1, "a", fmt.Sprint(i)))
	}
	snap := e.Snapshot()
	mustApply(t, e, command.Command{Index: 30, Data: command.EncodeCompact(20)})
	scrub := func() {
		for done := false; !done; {
			var err error
			done, err = e.Scrub(context.Background(), 7)
			require.NoError(t, err)
		}
	}
	scrub()
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	require.ErrorIs(t, e.AwaitScrub(ended, 20), context.Canceled)
	waited := make(chan error)
	go func() { waited <- e.AwaitScrub(context.Background(), 20) }()
	snap.Close()
	size := e.Size()
	scrub()
	require.NoError(t, <-waited)
	require.NoError(t, e.AwaitScrub(ended, 20))
	require.Less(t, e.Size(), size)
	require.NoError(t, e.Defragment(context.Background()))
	require.Equal(t, "a=19 ", content(t, e))
	go func() { waited <- e.AwaitScrub(context.Background(), 99) }()
	require.NoError(t, e.Close())
	require.ErrorIs(t, <-waited, ErrClosed)
}

// TestBatches checks that a batch has the same results as its commands one at a time, also if it reads at a revision
// that it has made itself, or needs larger buffers than those that are reused.
func TestBatches(t *testing.T) {
	a, key := []byte("a"), func(i int) []byte { return fmt.Appendf(nil, "k%04d", i*7919%1999) }
	var cmds []command.Command
	for i := range 1500 {
		cmds = append(cmds, program(t, uint64(i)+1, command.Step{Kind: command.StepPut, Key: key(i), Value: fmt.Append(nil, i), PrevKV: true}))
	}
	for i, steps := range [][]command.Step{
		{{Kind: command.StepRange, Key: a, End: []byte{0}, Range: RangeOptions{Revision: 700, WantCount: true, Limit: 5}}},
		{{Kind: command.StepRange, Key: a, End: []byte{0}, Range: RangeOptions{Revision: 1501, Reverse: true, Limit: 5}}},
		{{Kind: command.StepPut, Key: key(3), Value: a, PrevKV: true}, {Kind: command.StepRange, Key: key(3)}},
		{{Kind: command.StepDelete, Key: key(0), End: key(9), PrevKV: true}},
		{{Kind: command.StepRange, Key: a, End: []byte{0}, Range: RangeOptions{CountOnly: true}}},
	} {
		cmds = append(cmds, program(t, 1501+uint64(i), steps...))
	}
	for _, indexed := range []bool{true, false} {
		var all, single []command.Result
		for _, batch := range []int{len(cmds), 1} {
			e, err := Open(vfs.NewMem(), "data", Options{Quiet: true, KeyIndex: indexed})
			require.NoError(t, err)
			var got []command.Result
			for at := 0; at < len(cmds); at += batch {
				got = append(got, mustApply(t, e, cmds[at:at+batch]...)...)
			}
			all, single = single, got
			require.NoError(t, e.Close())
		}
		require.Equal(t, all, single)
	}
}

// TestRefusals checks that each refusal survives encoding and has its error, and that a program with more than
// maxChanges changes is refused.
func TestRefusals(t *testing.T) {
	for refusal, want := range map[command.Refusal]error{
		command.RefusedCompacted: ErrCompacted, command.RefusedFuture: ErrFutureRevision, command.RefusedTooMany: command.ErrTooMany, command.RefusedEpoch: command.ErrEpoch,
		command.RefusedLeaseNotFound: command.ErrLeaseNotFound, command.RefusedLeaseExists: command.ErrLeaseExists, command.RefusedKeyNotFound: command.ErrKeyNotFound,
	} {
		r := command.Result{Revision: 7, Time: 8, Refused: refusal}
		back, err := command.DecodeResult(command.EncodeResult(nil, r))
		require.NoError(t, err)
		require.Equal(t, r, back)
		require.ErrorIs(t, back.Err(), want)
	}
	e := newEngine(t)
	e.applier.maxChanges = 3
	var puts []command.Step
	for i := range 4 {
		puts = append(puts, command.Step{Kind: command.StepPut, Key: []byte{byte('a' + i)}})
	}
	require.Equal(t, command.RefusedTooMany, mustApply(t, e, program(t, 1, puts...))[0].Refused)
	require.Equal(t, command.RefusedNot, mustApply(t, e, program(t, 2, puts[:3]...))[0].Refused)
	require.Equal(t, command.RefusedNot, mustApply(t, e, program(t, 3, puts[3]))[0].Refused)
	all := command.Step{Kind: command.StepDelete, Key: []byte("a"), End: []byte("z")}
	require.Equal(t, command.RefusedTooMany, mustApply(t, e, program(t, 4, all))[0].Refused)
	require.Equal(t, int64(3), e.Revision())
	require.Equal(t, int64(4), e.Stats().Keys)
}

package export

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"go.etcd.io/etcd/tests/v3/robustness/model"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

// writeDataDir commits commands on a single member, stops it, and returns its data directory.
func writeDataDir(t *testing.T, commands ...[]byte) string {
	t.Helper()
	dir := t.TempDir()
	engine, err := mvcc.Open(vfs.Default, filepath.Join(dir, layout.KVName), mvcc.Options{})
	require.NoError(t, err)
	defer engine.Close()
	machine := store.NewStateMachine(engine, store.StateMachineOptions{NoIDs: true})
	defer machine.Close()
	host, err := consensus.Open(consensus.Options{
		ID: 1, Members: []uint64{1}, Dir: filepath.Join(dir, layout.RaftDir), Transport: discardTransport{}, Log: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	_, err = host.AddGroup(consensus.GroupOptions{ID: layout.KVGroup, Name: layout.KVName, Machine: machine})
	require.NoError(t, err)
	runner := consensus.Start(host, consensus.RunnerOptions{TickInterval: 10 * time.Millisecond})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	group := store.NewGroup(runner, layout.KVGroup)
	defer group.Close()
	for leader := uint64(0); leader == 0; {
		changed := group.Changed()
		if leader, _ = group.Leader(); leader == 0 {
			<-changed
		}
	}
	for i, data := range commands {
		_, err := runner.Propose(ctx, layout.KVGroup, [16]byte{1, byte(i)}, data)
		require.NoError(t, err)
	}
	require.NoError(t, runner.Stop(ctx))
	return dir
}

func program(t *testing.T, steps ...command.Step) []byte {
	t.Helper()
	data, err := command.EncodeProgram(command.Program{Steps: steps})
	require.NoError(t, err)
	return data
}

// TestRequests checks that the committed commands of a member are read from its directory in order, without refused
// ones. The last command may be missing from the result: its only purpose is that the member stores the commit index of
// the earlier ones.
func TestRequests(t *testing.T) {
	put := command.Step{Kind: command.StepPut, Key: []byte("k"), Value: []byte("v")}
	noLease := put
	noLease.Lease = 77
	dir := writeDataDir(t,
		program(t, command.Step{Kind: command.StepGrant, Lease: 5, TTL: 60}),
		program(t, put),
		program(t, noLease), // refused, because its lease does not exist
		program(t, put),
		command.EncodeCompact(2),
		program(t, command.Step{Kind: command.StepDelete, Key: []byte("k")}),
		program(t, put),
	)
	got, err := Requests([]Member{{ID: 1, DataDir: dir}})
	require.NoError(t, err)
	var kinds []model.RequestType
	for _, r := range got {
		kinds = append(kinds, r.Type)
	}
	want := []model.RequestType{model.LeaseGrant, model.Txn, model.Txn, model.Compact, model.Txn, model.Txn}
	require.GreaterOrEqual(t, len(kinds), len(want)-1)
	require.Equal(t, want[:len(kinds)], kinds)
	require.Equal(t, int64(2), got[3].Compact.Revision)
	require.Equal(t, "k", got[4].Txn.OperationsOnSuccess[0].Delete.Key)
}

func TestMissingLogIsAnError(t *testing.T) {
	_, err := Requests([]Member{{ID: 1, DataDir: t.TempDir()}})
	require.Error(t, err)
}

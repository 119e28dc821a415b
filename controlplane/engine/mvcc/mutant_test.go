//go:build mutant

package mvcc

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// TestMutants checks, for each mutant, that a test of the rule that it breaks passes without the mutant and fails with
// it.
func TestMutants(t *testing.T) {
	guarded := func(mod int64) []byte {
		data, err := command.EncodeTxn(command.Txn{
			Guards: []command.Guard{{Key: []byte("a"), ModRevision: mod}}, Ops: []command.Op{command.Put([]byte("a"), []byte("mine"))},
		})
		require.NoError(t, err)
		return data
	}
	stories := map[string]func(e *Engine) bool{
		// Two transactions have a guard that key a does not exist: the second one must conflict.
		mutant.DropGuards: func(e *Engine) bool {
			first := mustApply(t, e, command.Command{Index: 1, Data: guarded(0)})[0]
			second := mustApply(t, e, command.Command{Index: 2, Data: guarded(0)})[0]
			return !first.Conflict && second.Conflict && e.Revision() == 2
		},
		// A command that is proposed again with the same ID must return the first result and write once.
		mutant.ForgetProposalIDs: func(e *Engine) bool {
			c := command.Command{Index: 1, ID: [16]byte{1}, Data: guarded(0)}
			first := mustApply(t, e, c)[0]
			c.Index = 2
			again := mustApply(t, e, c)[0]
			return first.Conflict == again.Conflict && first.Revision == again.Revision && e.Revision() == 2
		},
		// A lease must not have a deleted key any more: a later put of the key without the lease must survive its
		// revocation.
		mutant.KeepAttachment: func(e *Engine) bool {
			key := []byte("a")
			mustApply(t, e, program(t, 1, command.Step{Kind: command.StepGrant, Lease: 1}, command.Step{Kind: command.StepPut, Key: key, Lease: 1}))
			mustApply(t, e, program(t, 2, command.Step{Kind: command.StepDelete, Key: key}))
			s := e.Snapshot()
			defer s.Close()
			keys, err := s.LeaseKeys(1)
			require.NoError(t, err)
			return len(keys) == 0
		},
		// A crash must never leave an applied index without what was applied.
		mutant.SplitAppliedIndex: func(*Engine) bool { return checkCrashes(t) },
	}
	t.Cleanup(func() { mutant.Set("") })
	for name, holds := range stories {
		mutant.Set("")
		require.True(t, holds(newEngine(t)), "without the mutant %s the rule holds", name)
		mutant.Set(name)
		require.False(t, holds(newEngine(t)), "%s is not noticed", name)
	}
}

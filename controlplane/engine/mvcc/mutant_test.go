//go:build mutant

package mvcc

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// For each mutant, the test that checks its rule passes without it and fails with it.
func TestMutants(t *testing.T) {
	guarded := func(mod int64) []byte {
		data, err := command.EncodeTxn(command.Txn{
			Guards: []command.Guard{{Key: []byte("a"), ModRevision: mod}}, Ops: []command.Op{command.Put([]byte("a"), []byte("mine"))},
		})
		require.NoError(t, err)
		return data
	}
	stories := map[string]func(e *Engine) bool{
		// Two callers read a as absent; one of them must lose.
		mutant.DropGuards: func(e *Engine) bool {
			first := mustApply(t, e, command.Command{Index: 1, Data: guarded(0)})[0]
			second := mustApply(t, e, command.Command{Index: 2, Data: guarded(0)})[0]
			return !first.Conflict && second.Conflict && e.Revision() == 2
		},
		// A retried proposal gets its first answer and writes once.
		mutant.ForgetProposalIDs: func(e *Engine) bool {
			c := command.Command{Index: 1, ID: [16]byte{1}, Data: guarded(0)}
			first := mustApply(t, e, c)[0]
			c.Index = 2
			again := mustApply(t, e, c)[0]
			return first.Conflict == again.Conflict && first.Revision == again.Revision && e.Revision() == 2
		},
		// A lease revokes only what it still has: a key that was deleted, and put again without it, stays.
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
		// A crash never leaves an applied index without what was applied.
		mutant.SplitAppliedIndex: func(*Engine) bool { return checkCrashes(t) },
	}
	t.Cleanup(func() { mutant.Set("") })
	for name, holds := range stories {
		mutant.Set("")
		require.True(t, holds(newEngine(t)), "%s: the rule", name)
		mutant.Set(name)
		require.False(t, holds(newEngine(t)), "%s is not noticed", name)
	}
}

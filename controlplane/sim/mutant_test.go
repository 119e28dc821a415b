//go:build mutant

package sim_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/sim"
	"github.com/trivet-cloud/trivet/controlplane/sim/live"
	"github.com/trivet-cloud/trivet/controlplane/sim/steps"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// TestMutantsRingA checks that ring (a) finds a violation within 60 seeds for each mutant that breaks a safety rule.
func TestMutantsRingA(t *testing.T) {
	const bound = 60
	t.Cleanup(func() { mutant.Set("") })
	for _, name := range []string{
		mutant.SkipLogSync, mutant.AckBeforeSync, mutant.DropVoteSync, mutant.ForgetDirIDs, mutant.AckBeforeCommit, mutant.StaleRead, mutant.DropGuards, mutant.ForgetProposalIDs,
	} {
		t.Run(name, func(t *testing.T) {
			mutant.Set(name)
			for seed := range uint64(bound) {
				if _, err := steps.Schedule(seed); err != nil {
					var v *sim.Violation
					require.ErrorAs(t, err, &v)
					t.Logf("seed %d: %s", seed, v.Says)
					return
				}
			}
			t.Fatalf("%d schedules found no violation with the mutant %s", bound, name)
		})
	}
}

// TestMutantsRingB checks that ring (b) finds a violation within 60 seeds for each mutant that breaks a safety rule.
func TestMutantsRingB(t *testing.T) {
	const bound = 60
	t.Cleanup(func() { mutant.Set("") })
	for _, name := range []string{mutant.IgnoreGeneration, mutant.ActiveWithoutAck, mutant.SendStaleBinding, mutant.ReuseAddress, mutant.KeepMovedFloating,
		mutant.AttachTwice, mutant.KeepAttachmentGeneration, mutant.ReleaseAttachedDisk, mutant.ReleaseDeletedEarly, mutant.MoveUnflushed, mutant.FenceEarly,
		mutant.CountSharedPoolTwice, mutant.FlattenEarly} {
		t.Run(name, func(t *testing.T) {
			mutant.Set(name)
			for seed := range uint64(bound) {
				if _, err := live.Run(t, seed); err != nil {
					var v *sim.Violation
					require.ErrorAs(t, err, &v)
					t.Logf("seed %d: %s", seed, v.Says)
					return
				}
			}
			t.Fatalf("%d runs found no violation with the mutant %s", bound, name)
		})
	}
}

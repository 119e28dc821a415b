package machine

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestMigrationAfterFaults checks plans for a host on which a step of a migration has failed.
func TestMigrationAfterFaults(t *testing.T) {
	const (
		target = agentv1.MigrationRole_MIGRATION_ROLE_TARGET
		source = agentv1.MigrationRole_MIGRATION_ROLE_SOURCE
	)
	assigned := func(role agentv1.MigrationRole, attempt uint64, phase agentv1.MigrationPhase) *agentv1.AssignedVm {
		return &agentv1.AssignedVm{Power: agentv1.Power_POWER_ON, Starts: 3,
			Migration: &agentv1.AssignedMigration{Attempt: attempt, Role: role, Phase: phase}}
	}
	record := func(m Migrations) Record { return Record{Built: true, Live: true, StartsDone: 3, Migration: m} }
	for name, c := range map[string]struct {
		want      *agentv1.AssignedVm
		have      Observation
		action    Action
		migration cloud.MigrationState
	}{
		"a target that does not answer may have the complete state": {
			want: assigned(target, 7, switchover), have: Observation{Record: record(Migrations{Incoming: 7}), Guest: Unresponsive},
		},
		"a target that does not answer and has no tunnel any more is ended before the switchover": {
			want: assigned(target, 7, transferIt), have: Observation{Record: record(Migrations{Incoming: 7}), Guest: Unresponsive},
			action: PowerOff,
		},
		"a target that does not answer is waited for before the switchover": {
			want: assigned(target, 7, transferIt), have: Observation{Record: record(Migrations{Incoming: 7}), Guest: Unresponsive,
				Transfer: Transfer{Tunnel: true}},
		},
		"a source without a tunnel does not hand the guest over": {
			want: assigned(source, 7, switchover), have: Observation{Guest: Paused, Record: record(Migrations{Outgoing: 7, Copied: 7}),
				Transfer: Transfer{Status: "pre-switchover", Held: true, Stopped: true}},
			action: CancelTransfer, migration: cloud.MigrationTransferring,
		},
		"a target that does not answer is ended when it must give up": {
			want: assigned(target, 7, rollback), have: Observation{Record: record(Migrations{Incoming: 7}), Guest: Unresponsive},
			action: PowerOff,
		},
		"a target that ends is waited for before the failure is recorded": {
			want: assigned(target, 7, prepare), have: Observation{Record: record(Migrations{Incoming: 7}), Guest: Off},
			action: PowerOff,
		},
		"a target is not RUNNING before its CPUs run": {
			want:   assigned(target, 7, switchover),
			have:   Observation{Record: record(Migrations{Incoming: 7, Committed: 7}), Guest: Paused, Transfer: Transfer{Held: true}},
			action: Arrive, migration: cloud.MigrationReceived,
		},
		"the CPUs of a target are started also after the migration has ended": {
			want:   &agentv1.AssignedVm{Power: agentv1.Power_POWER_ON, Starts: 3},
			have:   Observation{Record: record(Migrations{Incoming: 7, Committed: 7}), Guest: Paused, Transfer: Transfer{Held: true}},
			action: Arrive, migration: cloud.MigrationReceived,
		},
		"a target does not boot the guest for an attempt that is over": {
			want: assigned(target, 7, switchover), have: Observation{Record: Record{Built: true, Migration: Migrations{Committed: 9}}},
		},
		"the guest is handed over again if QEMU has not begun": {
			want: assigned(source, 7, switchover), have: Observation{Guest: Paused,
				Record:   record(Migrations{Outgoing: 7, Copied: 7, HandedOver: 7}),
				Transfer: Transfer{Status: "pre-switchover", Held: true, Stopped: true, Tunnel: true}},
			action: HandOver, migration: cloud.MigrationHandedOver,
		},
		"the guest is not handed over again without a tunnel": {
			want: assigned(source, 7, switchover), have: Observation{Guest: Paused,
				Record:   record(Migrations{Outgoing: 7, Copied: 7, HandedOver: 7}),
				Transfer: Transfer{Status: "pre-switchover", Held: true, Stopped: true}},
			migration: cloud.MigrationHandedOver,
		},
		"a guest that was not handed over again is taken back after the rollback": {
			want: assigned(source, 7, rollback), have: Observation{Guest: Paused,
				Record:   record(Migrations{Outgoing: 7, Copied: 7, HandedOver: 7}),
				Transfer: Transfer{Status: "pre-switchover", Held: true, Stopped: true}},
			action: CancelTransfer, migration: cloud.MigrationHandedOver,
		},
		"a source stays stopped until QEMU has ended the transfer": {
			want: assigned(source, 7, transferIt), have: Observation{Guest: Paused,
				Record:   record(Migrations{Outgoing: 7, Cancelled: 7, Running: 7}),
				Transfer: Transfer{Status: "cancelling", Running: true, Held: true}},
			action: EndTransfer, migration: cloud.MigrationCancelled,
		},
		"a thread of QEMU that waits for a killed tunnel is left alone": {
			want: assigned(source, 7, transferIt), have: Observation{Guest: Running,
				Record:   record(Migrations{Outgoing: 7, Cancelled: 7, Running: 7}),
				Transfer: Transfer{Status: "cancelling", Running: true}},
			migration: cloud.MigrationCancelled,
		},
		"a guest that ran until its memory was sent is not handed over": {
			want: assigned(source, 7, switchover), have: Observation{Guest: Paused,
				Record: record(Migrations{Outgoing: 7, Copied: 7, HandedOver: 7}), Transfer: Transfer{Status: "pre-switchover", Held: true}},
			migration: cloud.MigrationHandedOver,
		},
		"a tunnel of a cancelled attempt is ended": {
			want: assigned(source, 7, transferIt), have: Observation{Guest: Running,
				Record: record(Migrations{Outgoing: 7, Cancelled: 7, Running: 7}), Transfer: Transfer{Status: "failed", Running: true, Tunnel: true}},
			action: EndTransfer, migration: cloud.MigrationCancelled,
		},
	} {
		p := NextAction(c.want, c.have)
		require.Equal(t, c.action, p.Action, "%s: %s", name, p.Action)
		require.Equal(t, c.migration, p.Migration, name)
	}
}

// TestDescribeMachine checks that a description of the source's QEMU that cannot be sent is an error, which ends the
// migration.
func TestDescribeMachine(t *testing.T) {
	_, err := describeMachine(make([]byte, cloud.MaxMigrationMachine), nil)
	require.NoError(t, err)
	_, err = describeMachine(make([]byte, cloud.MaxMigrationMachine+1), nil)
	require.ErrorContains(t, err, "has 65537 bytes, the limit is 65536")
	_, err = describeMachine(nil, errors.New("no record"))
	require.ErrorContains(t, err, "no record")
}

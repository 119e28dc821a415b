package vm

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// withoutDisks makes a VM that boots nothing and that is started elsewhere after its host is lost.
func withoutDisks(r *CreateRequest) {
	r.Metadata = map[string]string{cloud.HighAvailability: "restart"}
	r.Spec.Disks = nil
}

// steps runs the leader's task for migrations without waiting for a migration.
func (w *world) steps() {
	w.t.Helper()
	require.NoError(w.t, w.vms.StepMigrations(w.t.Context()))
}

// TestSourceLostBeforeSwitchover loses the source of a migration before the switchover. The migration must end as soon
// as the lease of the source has ended, or a caller has confirmed that the host is off. The VM must then be recovered
// like each VM of a lost host, and the target must be told to destroy it.
func TestSourceLostBeforeSwitchover(t *testing.T) {
	for _, phase := range []cloud.MigrationPhase{cloud.MigrationPrepare, cloud.MigrationTransfer} {
		for _, byHand := range []bool{false, true} {
			t.Run(phase.String()+map[bool]string{true: ", confirmed off"}[byHand], func(t *testing.T) {
				w := newWorld(t)
				source := w.migrationHost("h1")
				id := w.create("web", withoutDisks).ID
				w.report(id, cloud.ObservedBuilt)
				w.power(id, start, 0)
				w.report(id, cloud.ObservedRunning, confirmed)
				neighbor := w.create("other", withoutDisks).ID
				w.report(neighbor, cloud.ObservedBuilt)
				w.power(neighbor, start, 0)
				w.report(neighbor, cloud.ObservedRunning, confirmed)
				target := w.migrationHost("h2")
				vm := w.migrate(id, target)
				if phase == cloud.MigrationTransfer {
					w.tell(vm, target, cloud.MigrationPrepared)
					vm = w.tell(vm, source, cloud.MigrationPrepared, confirmed)
				}
				require.Equal(t, phase, vm.Migration.Phase)
				w.Clock.Advance(cloud.HeartbeatTimeout*time.Millisecond + time.Second)
				w.Heartbeat(target)
				w.stepMigrations()
				require.Equal(t, cloud.Migrating, w.get(id).State, "the lease of the source has not ended")
				if byHand {
					_, err := w.nodes.FenceByHand(w.as(acme, ""), source, true)
					require.NoError(t, err)
				} else {
					w.Clock.Advance(node.LostTime * time.Millisecond)
				}
				w.Heartbeat(target)
				w.steps()
				vm = w.get(id)
				require.Equal(t, []any{cloud.Running, source}, []any{vm.State, vm.Node})
				require.Equal(t, "the source is lost", vm.LastMigration.Reason)
				require.Equal(t, agentv1.Power_POWER_DESTROYED, w.assignedTo(target, id).GetPower())
				w.reportAbsent(target, id, vm.Generation)

				w.recover()
				vm = w.get(id)
				require.Equal(t, []any{cloud.Creating, target, target}, []any{vm.State, vm.Node, vm.Choice.Node})
				require.Equal(t, target, w.get(neighbor).Node)
				require.Equal(t, agentv1.Power_POWER_DESTROYED, w.assignedTo(source, id).GetPower(), "the source may return")
			})
		}
	}
}

// TestRecoveryPassesMigratingVM checks that a VM that is being migrated, or whose recovery fails, does not delay the
// recovery of the other VMs of a lost host.
func TestRecoveryPassesMigratingVM(t *testing.T) {
	w := newWorld(t)
	w.migrationHost("h1")
	first := func(r *CreateRequest) { withoutDisks(r); r.Metadata[cloud.HAPriority] = "100" }
	start := func(name string, change func(*CreateRequest)) cloud.VMID {
		id := w.create(name, change).ID
		w.report(id, cloud.ObservedBuilt)
		w.power(id, start, 0)
		w.report(id, cloud.ObservedRunning, confirmed)
		return id
	}
	moving := start("moving", first)
	broken := start("broken", first)
	other := start("other", withoutDisks)
	target := w.migrationHost("h2")
	w.migrate(moving, target)
	w.update(func(tx *store.Tx) { // a record that no recovery can use
		vm, err := VMs.Get(tx, string(acme.Project), string(broken))
		require.NoError(t, err)
		vm.Spec.Disks = []cloud.Disk{{ID: "a", Volume: "00000000-0000-7000-b000-000000000099"}}
		VMs.Put(tx, vm, string(acme.Project), string(broken))
	})
	w.lose(target)
	w.AwaitFleet()
	require.ErrorContains(t, w.vms.Recover(t.Context()), "VM "+string(broken))
	w.followed()
	require.ErrorContains(t, func() error { w.Clock.Advance(rescanEvery); return w.vms.Recover(t.Context()) }(), "VM "+string(broken))
	require.Equal(t, []any{target, cloud.Migrating}, []any{w.get(other).Node, w.get(moving).State})
}

// TestHostsLostAfterSwitchover loses hosts of a migration after the switchover. The leader must use what it knows about
// the hosts also when a report causes the next step.
func TestHostsLostAfterSwitchover(t *testing.T) {
	for _, c := range []struct {
		name  string
		state cloud.MigrationState // of the source
		end   cloud.State
		host  string // "" if the VM must not have moved
		text  string
	}{
		// The source never runs the guest again, and the target has its complete disks.
		{"the source has handed over", cloud.MigrationHandedOver, cloud.Error, "h2", "the target has failed and the source is lost"},
		// The source may have cancelled the migration, and may have continued the guest.
		{"the source waited", cloud.MigrationAtSwitchover, cloud.Running, "", "`trivet host fence --confirmed-off`"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			source := w.migrationHost("h1")
			vm := w.createInState(cloud.Running, "web")
			target := w.migrationHost("h2")
			began := w.toSwitchover(vm.ID, target)
			w.tell(began, source, c.state)
			w.lose(target)
			vm = w.tell(began, target, cloud.MigrationFailed)
			if c.host == "" {
				require.Equal(t, cloud.MigrationRollback, vm.Migration.Phase)
				w.Clock.Advance(cloud.RollbackTime * time.Millisecond)
				w.Heartbeat(target)
				w.stepMigrations()
				vm = w.get(vm.ID)
				require.Equal(t, began.Migration.Attempt, w.assignedTo(source, vm.ID).GetRolledBackAttempt())
				require.Equal(t, source, vm.Node)
			} else {
				require.Equal(t, target, vm.Node)
				require.Contains(t, vm.History[len(vm.History)-1].Error, c.text)
			}
			require.Equal(t, c.end, vm.State)
			require.Contains(t, vm.Status.LastError, c.text)
		})
	}
}

// TestSourceWithoutRecord rolls a migration back to a source that has lost its record of the VM.
func TestSourceWithoutRecord(t *testing.T) {
	w := newWorld(t)
	source := w.migrationHost("h1")
	vm := w.createInState(cloud.Running, "web")
	target := w.migrationHost("h2")
	began := w.toSwitchover(vm.ID, target)
	w.tell(began, target, cloud.MigrationFailed)
	vm = w.tell(began, source, cloud.MigrationUnknown, func(o *cloud.Observation) { o.Observed = cloud.ObservedAbsent })
	require.Equal(t, []any{cloud.Error, source}, []any{vm.State, vm.Node})
	require.Contains(t, vm.Status.LastError, "the guest was lost during a migration")
}

// TestEvictedTarget evicts the target of a migration after the switchover. Its lease ends like that of a lost host.
func TestEvictedTarget(t *testing.T) {
	w := newWorld(t)
	source := w.migrationHost("h1")
	vm := w.createInState(cloud.Running, "web")
	target := w.migrationHost("h2")
	began := w.toSwitchover(vm.ID, target)
	w.tell(began, source, cloud.MigrationHandedOver)
	_, err := w.nodes.Evict(w.as(acme, ""), target, true)
	require.NoError(t, err)
	w.stepMigrations()
	require.Equal(t, target, w.get(vm.ID).Node, "the lease of the target has not ended")
	w.lose(source)
	w.stepMigrations()
	require.Equal(t, source, w.get(vm.ID).Node)
	vm = w.tell(began, source, cloud.MigrationRunning)
	require.Equal(t, cloud.Running, vm.State)
}

// TestPrepareToAnotherHost checks that PrepareVmMigration does not return a migration to another host as its own.
func TestPrepareToAnotherHost(t *testing.T) {
	w := newWorld(t)
	w.migrationHost("h1")
	vm := w.createInState(cloud.Running, "web")
	target := w.migrationHost("h2")
	w.migrationHost("h3")
	w.migrate(vm.ID, target)
	r := &server{s: w.vms}
	admin := &cloud.Caller{User: "root", Proof: cloud.ProofPassword, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}}
	prepare := func(host string) error {
		_, err := r.PrepareVmMigration(auth.With(t.Context(), admin, auth.RPC), &vmv1.PrepareVmMigrationRequest{
			VmId: string(vm.ID), ListenUri: "tcp:" + host + ":1", OrgId: string(acme.Org), ProjectId: string(acme.Project),
		})
		return err
	}
	require.NoError(t, prepare("h2"))
	err := prepare("h3")
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
	require.ErrorContains(t, err, "is being migrated to another host")
	require.Equal(t, target, w.get(vm.ID).Migration.Target)
}

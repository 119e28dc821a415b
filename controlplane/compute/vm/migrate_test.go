package vm

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// migrationHost adds a host with a network whose agent takes part in migrations.
func (w *world) migrationHost(name string, change ...func(*cloud.Node)) cloud.NodeID {
	id := w.AddHost(name, plenty(), append([]func(*cloud.Node){func(n *cloud.Node) { n.LiveMigration = true }}, change...)...)
	w.setNetwork(id)
	return id
}

// migrate begins a migration of the VM, and returns its record.
func (w *world) migrate(id cloud.VMID, to cloud.NodeID) *cloud.VM {
	w.t.Helper()
	out, err := w.vms.Migrate(w.as(acme, ""), acme, id, to, 0, false, [32]byte{})
	require.NoError(w.t, err)
	require.Equal(w.t, cloud.Migrating, out.VM.State)
	return w.get(id)
}

// tell reports, as one host of the VM's migration, how far the host has come.
func (w *world) tell(vm *cloud.VM, on cloud.NodeID, state cloud.MigrationState, change ...func(*cloud.Observation)) *cloud.VM {
	w.t.Helper()
	attempt := vm.Migration.Attempt
	vm = w.get(vm.ID)
	o := cloud.Observation{
		VM: vm.ID, Generation: vm.Generation, Observed: cloud.ObservedRunning, StartsDone: vm.Desired.Starts,
		Migration: &cloud.MigrationObservation{Attempt: attempt, State: state, TotalBytes: 100, SentBytes: 40},
	}
	if state == cloud.MigrationPrepared {
		o.Migration.Machine, o.Migration.Address = []byte("q35"), "198.51.100.2:7000"
	}
	for _, f := range change {
		f(&o)
	}
	_, err := w.vms.Observed(w.t.Context(), on, []cloud.Observation{o})
	require.NoError(w.t, err)
	return w.get(vm.ID)
}

// toSwitchover begins a migration and takes it to the switchover.
func (w *world) toSwitchover(id cloud.VMID, to cloud.NodeID) *cloud.VM {
	w.t.Helper()
	vm := w.migrate(id, to)
	w.tell(vm, to, cloud.MigrationPrepared)
	w.tell(vm, vm.Node, cloud.MigrationPrepared)
	vm = w.tell(vm, vm.Node, cloud.MigrationAtSwitchover)
	require.Equal(w.t, to, vm.Node)
	return vm
}

// assignedTo returns the desired state of a VM on a host, or nil.
func (w *world) assignedTo(on cloud.NodeID, id cloud.VMID) (out *agentv1.AssignedVm) {
	w.t.Helper()
	require.NoError(w.t, w.store.Local(func(v *store.View) error {
		all, err := w.vms.Assigned(v, on, id)
		if len(all) > 0 {
			out = all[0].State
		}
		return err
	}))
	return out
}

func withNIC(r *CreateRequest) { r.Spec.Network = []cloud.NIC{{ID: "nic0"}} }

// TestMigration takes a VM with a NIC to another host. Both hosts must have the VM assigned, the port must be bound to
// the runner, and the capacity on the source must stay allocated until the source has destroyed the VM.
func TestMigration(t *testing.T) {
	w := newWorld(t)
	source := w.migrationHost("h1")
	id := w.create("web", withNIC).ID
	w.report(id, cloud.ObservedBuilt)
	w.power(id, start, 0)
	vm := w.report(id, cloud.ObservedRunning)
	target := w.migrationHost("h2")
	port := vm.Spec.Network[0].PortID

	vm = w.migrate(id, "")
	require.Equal(t, []cloud.NodeID{source, target}, []cloud.NodeID{vm.Node, vm.Migration.Target})
	require.Equal(t, []cloud.Capacity{taken, taken}, []cloud.Capacity{w.allocated(source), w.allocated(target)})
	a := w.assignedTo(target, id).GetMigration()
	require.Equal(t, agentv1.MigrationRole_MIGRATION_ROLE_TARGET, a.GetRole())
	require.Equal(t, []string{string(source), ""}, []string{a.GetPeerNodeId(), string(a.GetMachine())})
	require.Equal(t, []cloud.NodeID{source, target}, []cloud.NodeID{w.port(port).Node, w.port(port).MigrationNode})
	binding := w.port(port).BindingGeneration

	vm = w.tell(vm, source, cloud.MigrationPrepared)
	require.Equal(t, "q35", string(w.assignedTo(target, id).GetMigration().GetMachine()))
	require.Equal(t, vm.Generation, w.assignedTo(target, id).GetGeneration())
	vm = w.tell(vm, target, cloud.MigrationPrepared)
	require.Equal(t, cloud.MigrationTransfer, vm.Migration.Phase)
	require.Equal(t, "198.51.100.2:7000", w.assignedTo(source, id).GetMigration().GetPeerAddress())
	w.awaitMigration()
	w.tell(vm, source, cloud.MigrationTransferring)
	progress, err := w.vms.GetMigration(t.Context(), acme, id)
	require.NoError(t, err)
	require.Equal(t, []uint64{100, 40}, []uint64{progress.TotalBytes, progress.SentBytes})

	vm = w.tell(vm, source, cloud.MigrationAtSwitchover)
	require.Equal(t, []cloud.NodeID{target, source}, []cloud.NodeID{w.port(port).Node, w.port(port).MigrationNode})
	require.Equal(t, binding+1, w.port(port).BindingGeneration)
	require.Equal(t, agentv1.MigrationPhase_MIGRATION_PHASE_SWITCHOVER, w.assignedTo(source, id).GetMigration().GetPhase())

	vm = w.tell(vm, target, cloud.MigrationRunning)
	require.Equal(t, []any{cloud.Running, target}, []any{vm.State, vm.Node})
	require.Nil(t, w.assignedTo(target, id).GetMigration())
	require.Equal(t, agentv1.Power_POWER_DESTROYED, w.assignedTo(source, id).GetPower())
	require.Empty(t, w.port(port).MigrationNode)
	require.Equal(t, taken, w.allocated(source), "the source has not destroyed the VM yet")
	w.reportAbsent(source, id, vm.Generation)
	require.Equal(t, []cloud.Capacity{{}, taken}, []cloud.Capacity{w.allocated(source), w.allocated(target)})
}

// TestMigrationIsUndone ends a migration before and after the switchover. The VM must run on the source, and the target
// must be told to destroy it and free its capacity.
func TestMigrationIsUndone(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(w *world, vm *cloud.VM, source, target cloud.NodeID) *cloud.VM
	}{
		{"cancelled by a call", func(w *world, vm *cloud.VM, _, to cloud.NodeID) *cloud.VM {
			vm = w.migrate(vm.ID, to)
			_, err := w.vms.CancelMigration(w.as(acme, ""), acme, vm.ID)
			require.NoError(t, err)
			return w.get(vm.ID)
		}},
		{"the deadline passes", func(w *world, vm *cloud.VM, source, to cloud.NodeID) *cloud.VM {
			vm = w.migrate(vm.ID, to)
			w.Clock.Advance(time.Duration(vm.Migration.Deadline-vm.Migration.Began) * time.Millisecond)
			w.Heartbeat(source)
			w.Heartbeat(to)
			w.stepMigrations()
			return w.get(vm.ID)
		}},
		{"the target fails", func(w *world, vm *cloud.VM, _, to cloud.NodeID) *cloud.VM {
			vm = w.migrate(vm.ID, to)
			return w.tell(vm, to, cloud.MigrationFailed)
		}},
		{"the target fails after the switchover", func(w *world, vm *cloud.VM, source, to cloud.NodeID) *cloud.VM {
			began := w.toSwitchover(vm.ID, to)
			w.tell(began, source, cloud.MigrationHandedOver)
			vm = w.tell(began, to, cloud.MigrationFailed)
			require.Equal(t, []any{cloud.Migrating, source}, []any{vm.State, vm.Node})
			return w.tell(began, source, cloud.MigrationRunning)
		}},
		{"the target's host is lost after the switchover", func(w *world, vm *cloud.VM, source, to cloud.NodeID) *cloud.VM {
			began := w.toSwitchover(vm.ID, to)
			w.tell(began, source, cloud.MigrationHandedOver)
			w.Clock.Advance(cloud.HeartbeatTimeout*time.Millisecond + time.Second)
			w.Heartbeat(source)
			w.stepMigrations()
			require.Equal(t, to, w.get(vm.ID).Node, "the target's lease has not ended")
			w.Clock.Advance(node.LostTime * time.Millisecond)
			w.Heartbeat(source)
			w.stepMigrations()
			require.Equal(t, source, w.get(vm.ID).Node)
			return w.tell(began, source, cloud.MigrationRunning)
		}},
		{"the source had cancelled before it got the switchover", func(w *world, vm *cloud.VM, source, to cloud.NodeID) *cloud.VM {
			return w.tell(w.toSwitchover(vm.ID, to), source, cloud.MigrationCancelled)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			source := w.migrationHost("h1")
			vm := w.createInState(cloud.Running, "web")
			target := w.migrationHost("h2")
			vm = c.end(w, vm, source, target)
			require.Equal(t, []any{cloud.Running, source}, []any{vm.State, vm.Node})
			require.NotEmpty(t, vm.LastMigration.Reason)
			require.Nil(t, w.assignedTo(source, vm.ID).GetMigration())
			require.Equal(t, agentv1.Power_POWER_DESTROYED, w.assignedTo(target, vm.ID).GetPower(), "the target must destroy the VM")
			w.reportAbsent(target, vm.ID, vm.Generation)
			require.Equal(t, []cloud.Capacity{taken, {}}, []cloud.Capacity{w.allocated(source), w.allocated(target)})
		})
	}
}

// awaitMigration waits until the service has seen that a VM is being migrated.
func (w *world) awaitMigration() {
	w.t.Helper()
	require.Eventually(w.t, func() bool {
		w.vms.mu.Lock()
		defer w.vms.mu.Unlock()
		return len(w.vms.migrations) == 1
	}, 10*time.Second, time.Millisecond)
}

// stepMigrations runs the leader's task.
func (w *world) stepMigrations() {
	w.t.Helper()
	w.awaitMigration()
	require.NoError(w.t, w.vms.StepMigrations(w.t.Context()))
}

// TestMigratingVMRefusesCalls checks the calls for a MIGRATING VM: all changes are refused, except a forced stop or
// delete, which end the migration.
func TestMigratingVMRefusesCalls(t *testing.T) {
	w := newWorld(t)
	source := w.migrationHost("h1")
	vm := w.createInState(cloud.Running, "web")
	target := w.migrationHost("h2")
	id := w.migrate(vm.ID, target).ID
	before := w.get(id)
	do := func(a powerAction, grace uint64) error {
		_, err := w.vms.changePowerOnLeader(w.as(acme, ""), powerRequest{Tenant: acme, VM: id, Action: a, GraceMS: grace})
		return err
	}
	_, update := w.vms.Update(w.as(acme, ""), acme, id, Change{Labels: map[string]string{"a": "b"}})
	_, del := w.vms.Delete(w.as(acme, ""), acme, id, false, [32]byte{})
	_, again := w.vms.Migrate(w.as(acme, ""), acme, id, target, 0, false, [32]byte{})
	for name, err := range map[string]error{
		"stop": do(stop, 1000), "reboot": do(reboot, 0), "reset": do(reset, 0), "update": update, "delete": del, "migrate": again,
	} {
		require.True(t, fault.Is(err, fault.FailedPrecondition), "%s: %v", name, err)
	}
	require.NoError(t, do(start, 0))
	require.Equal(t, before, w.get(id))

	require.NoError(t, do(stop, 0))
	vm = w.get(id)
	require.Equal(t, []any{cloud.Stopping, source}, []any{vm.State, vm.Node})
	require.Equal(t, agentv1.Power_POWER_DESTROYED, w.assignedTo(target, id).GetPower())
	w.reportAbsent(target, id, vm.Generation)
	w.report(id, cloud.ObservedBuilt)
	w.power(id, start, 0)
	w.report(id, cloud.ObservedRunning)

	w.toSwitchover(id, target)
	err := do(stop, 0)
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
	require.ErrorContains(t, err, "can no longer be cancelled")
	_, err = w.vms.CancelMigration(w.as(acme, ""), acme, id)
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
	_, err = w.vms.deleteOnLeader(w.as(acme, ""), deleteRequest{Tenant: acme, VM: id, Force: true})
	require.NoError(t, err)
	for _, host := range []cloud.NodeID{source, target} {
		require.Equal(t, agentv1.Power_POWER_DESTROYED, w.assignedTo(host, id).GetPower())
		w.reportAbsent(host, id, before.Generation+100)
		require.Equal(t, cloud.Capacity{}, w.allocated(host))
	}
}

// TestMigrationIsRefused checks the VMs and hosts for which no migration begins. Nothing may change.
func TestMigrationIsRefused(t *testing.T) {
	w := newWorld(t)
	source := w.migrationHost("h1")
	vm := w.createInState(cloud.Running, "web")
	stopped := w.createInState(cloud.Stopped, "off")
	old := w.AddHost("old", plenty())
	w.setNetwork(old)
	kvm := w.migrationHost("kvm", func(n *cloud.Node) { n.Labels = map[string]string{cloud.AcceleratorLabel: cloud.AcceleratorKVM} })
	small := w.migrationHost("small", func(n *cloud.Node) { n.Allocatable.MemoryMiB = 100 })
	cordoned := w.migrationHost("cordoned")
	w.cordon(cordoned)
	w.AwaitFleet()
	for _, c := range []struct {
		name string
		vm   cloud.VMID
		to   cloud.NodeID
		kind fault.Kind
		text string
	}{
		{"a stopped VM", stopped.ID, small, fault.FailedPrecondition, "it is STOPPED"},
		{"the own host", vm.ID, source, fault.FailedPrecondition, "already on host"},
		{"an unknown host", vm.ID, "00000000-0000-7000-a000-000000000099", fault.NotFound, "no node"},
		{"an old agent", vm.ID, old, fault.FailedPrecondition, "old has an agent that cannot migrate VMs"},
		{"another accelerator", vm.ID, kvm, fault.FailedPrecondition, "kvm runs guests with another accelerator"},
		{"no room", vm.ID, small, fault.FailedPrecondition, "small has 100 MiB of memory free, 512 needed"},
		{"a cordoned host", vm.ID, cordoned, fault.FailedPrecondition, "cordoned is CORDONED"},
		{"no host", vm.ID, "", fault.ResourceExhausted, "no host fits"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := w.vms.Migrate(w.as(acme, ""), acme, c.vm, c.to, 0, false, [32]byte{})
			require.True(t, fault.Is(err, c.kind), "%v", err)
			require.ErrorContains(t, err, c.text)
		})
	}
	require.Equal(t, vm, w.get(vm.ID))
	_, err := w.vms.Migrate(w.as(acme, ""), acme, vm.ID, small, cloud.MaxMigrationSeconds+1, false, [32]byte{})
	require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
}

// TestMigrationNeedsBaselineCPU checks that a VM whose spec requests no CPU model gets one that all hosts offer, so that
// it can be migrated between different hosts with KVM. A VM with the CPU of its host must not be migrated.
func TestMigrationNeedsBaselineCPU(t *testing.T) {
	w := newWorld(t)
	offer := func(models ...string) func(*cloud.Node) {
		return func(n *cloud.Node) {
			n.Labels, n.CPUModels = map[string]string{cloud.AcceleratorLabel: cloud.AcceleratorKVM}, append(models, "host", "max")
		}
	}
	source := w.migrationHost("haswell", offer("Haswell-v4", "Nehalem-v1"))
	w.AwaitFleet()
	alone := w.createInState(cloud.Running, "alone")
	require.Equal(t, "Haswell-v4", alone.CPUModel())
	require.Empty(t, alone.Spec.CPU.Model)
	require.Equal(t, "Haswell-v4", w.assignedTo(source, alone.ID).GetCpuModel())

	target := w.migrationHost("nehalem", offer("Nehalem-v1"))
	w.AwaitFleet()
	_, err := w.vms.Migrate(w.as(acme, ""), acme, alone.ID, target, 0, false, [32]byte{})
	require.ErrorContains(t, err, "does not offer the CPU model Haswell-v4")
	common := w.createInState(cloud.Running, "common")
	require.Equal(t, "Nehalem-v1", common.CPUModel())
	other := map[cloud.NodeID]cloud.NodeID{source: target, target: source}[common.Node]
	w.migrate(common.ID, other)
	require.Equal(t, "Nehalem-v1", w.assignedTo(other, common.ID).GetCpuModel())

	stopped := w.create("stopped", func(r *CreateRequest) { r.Spec.CPU = &cloud.CPU{VCPUs: 1, Model: "Nehalem-v1"} })
	w.report(stopped.ID, cloud.ObservedBuilt)
	require.Empty(t, stopped.BaselineCPU)
	_, err = w.vms.Update(w.as(acme, ""), acme, stopped.ID, Change{CPU: &cloud.CPU{VCPUs: 1}})
	require.NoError(t, err)
	require.Equal(t, "Nehalem-v1", w.get(stopped.ID).CPUModel(), "a VM without its own model needs a baseline")

	for _, model := range []string{"host", "max", ""} {
		w.update(func(tx *store.Tx) {
			vm := *alone
			cpu := *vm.Spec.CPU
			vm.Spec.CPU, vm.BaselineCPU = &cpu, ""
			vm.Spec.CPU.Model = model
			VMs.Put(tx, &vm, string(acme.Project), string(vm.ID))
		})
		_, err = w.vms.Migrate(w.as(acme, ""), acme, alone.ID, "", 0, false, [32]byte{})
		require.ErrorContains(t, err, "uses the CPU model of its host", "model %q", model)
	}
}

// TestMigrateWaits checks that Migrate with wait returns when the migration has ended: without an error on the target,
// and otherwise with the reason.
func TestMigrateWaits(t *testing.T) {
	w := newWorld(t)
	source := w.migrationHost("h1")
	vm := w.createInState(cloud.Running, "web")
	target := w.migrationHost("h2")
	wait := func(to cloud.NodeID) func() (PowerResult, error) {
		return func() (PowerResult, error) {
			return w.vms.Migrate(w.as(acme, ""), acme, vm.ID, to, 0, true, [32]byte{})
		}
	}
	withKey := func() (PowerResult, error) {
		return w.vms.Migrate(w.as(acme, "once"), acme, vm.ID, target, 0, true, [32]byte{})
	}
	_, err := w.whenRequested(vm, func() {
		w.tell(w.get(vm.ID), target, cloud.MigrationFailed, func(o *cloud.Observation) { o.Migration.Error = "no space" })
	}, withKey)
	require.ErrorContains(t, err, "was not migrated: no space")
	_, err = withKey()
	require.ErrorContains(t, err, "was not migrated: no space", "a repeat of the call reports success")
	w.reportAbsent(target, vm.ID, w.get(vm.ID).Generation)

	now := w.get(vm.ID)
	out, err := w.whenRequested(now, func() {
		began := w.get(vm.ID)
		w.tell(began, target, cloud.MigrationPrepared)
		w.tell(began, source, cloud.MigrationPrepared)
		w.tell(began, source, cloud.MigrationAtSwitchover)
		w.tell(began, target, cloud.MigrationRunning)
	}, wait(target))
	require.NoError(t, err)
	require.Equal(t, []any{cloud.Running, target}, []any{out.VM.State, out.VM.Node})
}

// TestSendRunningNeedsTheTarget checks that the assignment of the source has SendRunning only if the agent of the
// target reports the feature running-migration.
func TestSendRunningNeedsTheTarget(t *testing.T) {
	for _, able := range []bool{false, true} {
		w := newWorld(t)
		source := w.migrationHost("n1")
		vm := w.createInState(cloud.Running, "web")
		target := w.migrationHost("n2", func(n *cloud.Node) {
			if able {
				n.Features = map[string]string{cloud.FeatureRunningMigration: ""}
			}
		})
		vm = w.migrate(vm.ID, target)
		require.Equal(t, able, w.assignedTo(source, vm.ID).GetMigration().GetSendRunning())
		require.False(t, w.assignedTo(target, vm.ID).GetMigration().GetSendRunning())
	}
}

// TestMemoryChannelsNeedBothHosts checks that both hosts are assigned the number of connections that the source has
// reported, but only if the target reports the feature memory-channels. A later report does not change the number.
func TestMemoryChannelsNeedBothHosts(t *testing.T) {
	for _, c := range []struct {
		features map[string]string
		reported uint32
		want     uint32
	}{
		{map[string]string{cloud.FeatureMemoryChannels: ""}, 4, 4},
		{map[string]string{cloud.FeatureMemoryChannels: ""}, 0, 0},    // the source's agent is of an earlier version
		{map[string]string{cloud.FeatureMemoryChannels: ""}, 500, 16}, // more than any agent uses
		{map[string]string{cloud.FeatureMemoryChannels: "QEMU is too new"}, 4, 0},
		{nil, 4, 0}, // the target's agent is of an earlier version
	} {
		w := newWorld(t)
		source := w.migrationHost("n1")
		vm := w.createInState(cloud.Running, "web")
		target := w.migrationHost("n2", func(n *cloud.Node) { n.Features = c.features })
		vm = w.migrate(vm.ID, target)
		require.Zero(t, w.assignedTo(target, vm.ID).GetMigration().GetMemoryChannels())
		for _, reported := range []uint32{c.reported, 7} {
			w.tell(vm, source, cloud.MigrationPrepared, func(o *cloud.Observation) { o.Migration.MemoryChannels = reported })
			for _, host := range []cloud.NodeID{source, target} {
				m := w.assignedTo(host, vm.ID).GetMigration()
				require.Equal(t, c.want, m.GetMemoryChannels())
				require.Equal(t, host == target, len(m.GetMachine()) > 0)
			}
		}
	}
}

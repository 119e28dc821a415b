package vm

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestPowerTable makes each power call in each state. The table has the state that must follow, or "no" if the call
// must be refused.
func TestPowerTable(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", cloud.Capacity{VCPUs: 1000, MemoryMiB: 1 << 20, StorageGiB: 10_000})
	const no = cloud.Unspecified
	i := 0
	for state, row := range map[cloud.State]map[powerAction]cloud.State{
		cloud.Creating: {start: cloud.Creating, stop: cloud.Creating, reboot: no, reset: no},
		cloud.Stopped:  {start: cloud.Starting, stop: cloud.Stopped, reboot: no, reset: no},
		cloud.Starting: {start: cloud.Starting, stop: cloud.Stopping, reboot: no, reset: no},
		cloud.Running:  {start: cloud.Running, stop: cloud.Stopping, reboot: cloud.Running, reset: cloud.Running},
		cloud.Stopping: {start: cloud.Stopping, stop: cloud.Stopping, reboot: no, reset: no},
		cloud.Error:    {start: cloud.Starting, stop: cloud.Stopping, reboot: no, reset: no},
		cloud.Failed:   {start: no, stop: no, reboot: no, reset: no},
	} {
		for a, want := range row {
			i++
			vm := w.createInState(state, fmt.Sprint("vm-", i))
			out, err := w.vms.changePowerOnLeader(w.as(acme, ""), powerRequest{Tenant: acme, VM: vm.ID, Action: a, GraceMS: 1000})
			if want == no {
				require.True(t, fault.Is(err, fault.FailedPrecondition), "%s in %s: %v", a, state, err)
				require.ErrorContains(t, err, state.String())
				require.Equal(t, vm, w.get(vm.ID))
				continue
			}
			require.NoError(t, err, "%s in %s", a, state)
			require.Equal(t, want, out.VM.State, "%s in %s", a, state)
			now := w.get(vm.ID)
			require.Equal(t, out.VM, *now, "the response must equal the record")
			if now.Desired != vm.Desired {
				require.Greater(t, now.Generation, vm.Generation, "the host must get the new desired state")
			} else {
				require.Equal(t, vm, now, "a refused call must not change the VM")
			}
		}
	}
	require.Equal(t, 28, i)
}

// TestPowerCallsWait checks that each power call waits for the host's report and returns the VM in its new state, or an
// error if the VM cannot reach the desired state.
func TestPowerCallsWait(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	body := [32]byte{}
	for _, c := range []struct {
		name string
		from cloud.State
		call func(context.Context, cloud.VMID) (PowerResult, error)
		// seen makes the host's reports after the call, or the call of another caller.
		seen func(cloud.VMID)
		kind fault.Kind
		says string
		to   cloud.State
	}{
		{"start", cloud.Stopped, func(ctx context.Context, id cloud.VMID) (PowerResult, error) { return w.vms.Start(ctx, acme, id, body) },
			func(id cloud.VMID) { w.report(id, cloud.ObservedLaunching); w.report(id, cloud.ObservedRunning) }, 0, "", cloud.Running},
		{"start while the disks are made", cloud.Creating, func(ctx context.Context, id cloud.VMID) (PowerResult, error) { return w.vms.Start(ctx, acme, id, body) },
			func(id cloud.VMID) { w.report(id, cloud.ObservedBuilt); w.report(id, cloud.ObservedRunning) }, 0, "", cloud.Running},
		{"start while the VM stops", cloud.Stopping, func(ctx context.Context, id cloud.VMID) (PowerResult, error) { return w.vms.Start(ctx, acme, id, body) },
			func(id cloud.VMID) { w.report(id, cloud.ObservedBuilt); w.report(id, cloud.ObservedRunning) }, 0, "", cloud.Running},
		{"a start that fails", cloud.Stopped, func(ctx context.Context, id cloud.VMID) (PowerResult, error) { return w.vms.Start(ctx, acme, id, body) },
			func(id cloud.VMID) { w.report(id, cloud.ObservedEnded, failed("no memory left")) }, fault.FailedPrecondition, "no memory left", 0},
		{"a start of a VM that another caller stops", cloud.Stopped, func(ctx context.Context, id cloud.VMID) (PowerResult, error) { return w.vms.Start(ctx, acme, id, body) },
			func(id cloud.VMID) { w.power(id, stop, 0) }, fault.FailedPrecondition, "stopped meanwhile", 0},
		{"a start of a VM that another caller deletes", cloud.Stopped, func(ctx context.Context, id cloud.VMID) (PowerResult, error) { return w.vms.Start(ctx, acme, id, body) },
			func(id cloud.VMID) { w.deleteIfPresent(id) }, fault.FailedPrecondition, "deleted meanwhile", 0},
		{"stop", cloud.Running, func(ctx context.Context, id cloud.VMID) (PowerResult, error) {
			return w.vms.Stop(ctx, acme, id, time.Second, body)
		}, func(id cloud.VMID) { w.report(id, cloud.ObservedStopping); w.report(id, cloud.ObservedBuilt) }, 0, "", cloud.Stopped},
		{"a forced stop of a VM in STOPPING", cloud.Stopping, func(ctx context.Context, id cloud.VMID) (PowerResult, error) {
			return w.vms.Stop(ctx, acme, id, 0, body)
		},
			func(id cloud.VMID) {
				require.Zero(t, w.get(id).Desired.GraceMS)
				w.report(id, cloud.ObservedBuilt)
			}, 0, "", cloud.Stopped},
		{"a stop of a VM that another caller starts again", cloud.Running, func(ctx context.Context, id cloud.VMID) (PowerResult, error) {
			return w.vms.Stop(ctx, acme, id, time.Second, body)
		}, func(id cloud.VMID) { w.power(id, start, 0) }, fault.FailedPrecondition, "started again", 0},
		{"reboot", cloud.Running, func(ctx context.Context, id cloud.VMID) (PowerResult, error) {
			return w.vms.Reboot(ctx, acme, id, body)
		},
			func(id cloud.VMID) { w.report(id, cloud.ObservedRunning) }, 0, "", cloud.Running},
		{"a reboot during which the guest ends", cloud.Running, func(ctx context.Context, id cloud.VMID) (PowerResult, error) {
			return w.vms.Reboot(ctx, acme, id, body)
		},
			func(id cloud.VMID) { w.report(id, cloud.ObservedEnded, failed("killed")) }, fault.FailedPrecondition, "killed", 0},
		{"reset", cloud.Running, func(ctx context.Context, id cloud.VMID) (PowerResult, error) { return w.vms.Reset(ctx, acme, id, body) },
			func(id cloud.VMID) { w.report(id, cloud.ObservedRunning) }, 0, "", cloud.Running},
	} {
		t.Run(c.name, func(t *testing.T) {
			vm := w.createInState(c.from, "waiting")
			defer w.deleteIfPresent(vm.ID)
			requested := make(chan struct{})
			go func() {
				// The call increments the VM's generation when it stores the desired state.
				store.Await(t.Context(), w.store, VMs, func(now *cloud.VM) (bool, error) { return now.Generation > vm.Generation, nil },
					string(acme.Project), string(vm.ID))
				c.seen(vm.ID)
				close(requested)
			}()
			out, err := c.call(w.as(acme, ""), vm.ID)
			<-requested
			if c.to == 0 {
				require.True(t, fault.Is(err, c.kind), "%v", err)
				require.ErrorContains(t, err, c.says)
				return
			}
			require.NoError(t, err)
			require.False(t, out.WaitEnded)
			require.Equal(t, c.to, out.VM.State)
			require.Equal(t, w.get(vm.ID), out.VM)
		})
	}
}

// power stores the desired state of a power call without waiting for the VM.
func (w *world) power(id cloud.VMID, a powerAction, grace uint64) {
	w.t.Helper()
	_, err := w.vms.changePowerOnLeader(w.as(acme, ""), powerRequest{Tenant: acme, VM: id, Action: a, GraceMS: grace})
	require.NoError(w.t, err)
}

// deleteIfPresent deletes a VM by force and reports it absent as its host. It does nothing if the VM does not exist.
func (w *world) deleteIfPresent(id cloud.VMID) {
	w.t.Helper()
	vm, err := w.vms.Get(w.t.Context(), acme, id)
	if err != nil {
		return
	}
	_, err = w.vms.deleteOnLeader(w.as(acme, ""), deleteRequest{Tenant: acme, VM: id, Force: true})
	require.NoError(w.t, err)
	w.reportAbsent(vm.Node, id, vm.Generation+1)
}

// TestNoOpPowerCalls checks that a start of a running VM and a stop of a stopped one return at once.
func TestNoOpPowerCalls(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	ctx, body := w.as(acme, ""), [32]byte{}
	running, stopped := w.createInState(cloud.Running, "on"), w.createInState(cloud.Stopped, "off")
	out, err := w.vms.Start(ctx, acme, running.ID, body)
	require.NoError(t, err)
	require.Equal(t, PowerResult{VM: running}, out)
	out, err = w.vms.Stop(ctx, acme, stopped.ID, time.Minute, body)
	require.NoError(t, err)
	require.Equal(t, PowerResult{VM: stopped}, out)
}

// TestPowerWaitTimesOut checks how long each power call waits for a host that reports nothing. The call must then
// return the current VM, and the desired state must stay stored.
func TestPowerWaitTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.AddHost("h1", plenty())
		ctx, body := w.as(acme, ""), [32]byte{}
		for name, c := range map[string]struct {
			from cloud.State
			call func(cloud.VMID) (PowerResult, error)
			wait time.Duration
		}{
			"start":  {cloud.Stopped, func(id cloud.VMID) (PowerResult, error) { return w.vms.Start(ctx, acme, id, body) }, 30 * time.Second},
			"stop":   {cloud.Running, func(id cloud.VMID) (PowerResult, error) { return w.vms.Stop(ctx, acme, id, 20*time.Second, body) }, 30 * time.Second},
			"force":  {cloud.Running, func(id cloud.VMID) (PowerResult, error) { return w.vms.Stop(ctx, acme, id, 0, body) }, 10 * time.Second},
			"reboot": {cloud.Running, func(id cloud.VMID) (PowerResult, error) { return w.vms.Reboot(ctx, acme, id, body) }, 75 * time.Second},
		} {
			vm := w.createInState(c.from, name)
			began := time.Now()
			out, err := c.call(vm.ID)
			require.NoError(t, err)
			require.True(t, out.WaitEnded)
			require.Equal(t, c.wait, time.Since(began), name)
			now := w.get(vm.ID)
			require.Equal(t, now, out.VM)
			require.NotEqual(t, vm.Desired, now.Desired)
		}

		// If the caller cancels, the wait must end, and the desired state must stay stored.
		vm := w.createInState(cloud.Stopped, "left")
		leaving, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := w.vms.Start(leaving, acme, vm.ID, body)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, cloud.Starting, w.get(vm.ID).State)
	})
}

// TestPowerIsIdempotent repeats power calls under their idempotency keys. They must have no second effect: no second
// reboot, and no start after a stop. They must return their response, also if the VM was deleted. Without a key, a
// repeated reboot must be another reboot.
func TestPowerIsIdempotent(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Running, "web")
	press := func(key string) powerResponse {
		out, err := pulseCommand.Call(w.as(acme, key), w.vms.opts.Commands, powerRequest{Tenant: acme, VM: vm.ID, Action: reboot})
		require.NoError(t, err)
		return out
	}
	require.False(t, press("k").Replayed)
	require.True(t, press("k").Replayed)
	require.EqualValues(t, 1, w.get(vm.ID).Desired.Reboots)
	press("")
	press("")
	require.EqualValues(t, 3, w.get(vm.ID).Desired.Reboots)

	body := [32]byte{}
	out, err := w.vms.Start(w.as(acme, "s"), acme, vm.ID, body)
	require.NoError(t, err)
	require.False(t, out.Replayed)
	w.power(vm.ID, stop, 0)
	w.report(vm.ID, cloud.ObservedBuilt)
	out, err = w.vms.Start(w.as(acme, "s"), acme, vm.ID, body)
	require.NoError(t, err)
	require.True(t, out.Replayed)
	require.Equal(t, cloud.Running, out.VM.State, "the repeated call must return the first response")
	require.Equal(t, cloud.Stopped, w.get(vm.ID).State, "the repeated call must not start it again")
	_, err = w.vms.Start(w.as(acme, "s"), acme, vm.ID, [32]byte{1})
	require.True(t, fault.Is(err, fault.InvalidArgument), "another request under the same key must be refused: %v", err)

	// The first call returns while the start is in progress. Before the call is repeated, the VM is deleted, or the
	// start fails.
	w.startWithKey(t, vm.ID, "late")
	w.deleteIfPresent(vm.ID)
	out, err = w.vms.Start(w.as(acme, "late"), acme, vm.ID, body)
	require.NoError(t, err)
	require.True(t, out.Replayed)
	require.Equal(t, cloud.Starting, out.VM.State)

	failing := w.createInState(cloud.Stopped, "failing")
	w.startWithKey(t, failing.ID, "f")
	w.report(failing.ID, cloud.ObservedEnded, failed("no memory"))
	_, err = w.vms.Start(w.as(acme, "f"), acme, failing.ID, body)
	require.True(t, fault.Is(err, fault.FailedPrecondition), "a repeated call must not turn a failed start into a success")
	require.ErrorContains(t, err, "no memory")
}

// startWithKey runs the start command on the leader under an idempotency key, without waiting for the VM.
func (w *world) startWithKey(t *testing.T, id cloud.VMID, key string) {
	_, err := setPowerCommand.Call(w.as(acme, key), w.vms.opts.Commands, powerRequest{Tenant: acme, VM: id, Action: start})
	require.NoError(t, err)
}

// TestIDs makes every call with malformed VM IDs, which must give InvalidArgument, and with IDs of VMs of other
// projects or orgs, which must give NotFound.
func TestIDs(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Running, "web")
	body := [32]byte{}
	for name, call := range map[string]func(context.Context, cloud.Tenant, cloud.VMID) error{
		"get": func(ctx context.Context, t cloud.Tenant, id cloud.VMID) error {
			_, err := w.vms.Get(ctx, t, id)
			return err
		},
		"start": func(ctx context.Context, t cloud.Tenant, id cloud.VMID) error {
			_, err := w.vms.Start(ctx, t, id, body)
			return err
		},
		"stop": func(ctx context.Context, t cloud.Tenant, id cloud.VMID) error {
			_, err := w.vms.Stop(ctx, t, id, 0, body)
			return err
		},
		"reboot": func(ctx context.Context, t cloud.Tenant, id cloud.VMID) error {
			_, err := w.vms.Reboot(ctx, t, id, body)
			return err
		},
		"reset": func(ctx context.Context, t cloud.Tenant, id cloud.VMID) error {
			_, err := w.vms.Reset(ctx, t, id, body)
			return err
		},
		"delete": func(ctx context.Context, t cloud.Tenant, id cloud.VMID) error {
			_, err := w.vms.Delete(ctx, t, id, true, body)
			return err
		},
		"update": func(ctx context.Context, t cloud.Tenant, id cloud.VMID) error {
			_, err := w.vms.Update(ctx, t, id, Change{Labels: map[string]string{"a": "b"}})
			return err
		},
		"watch": func(ctx context.Context, t cloud.Tenant, id cloud.VMID) error {
			return w.vms.Watch(ctx, t, id, func(rpc.Lazy) error { return nil })
		},
		"console": func(ctx context.Context, t cloud.Tenant, id cloud.VMID) error {
			return w.vms.Console(ctx, t, id, false, 0, func([]byte) error { return nil })
		},
		"migrate": func(ctx context.Context, t cloud.Tenant, id cloud.VMID) error {
			_, err := w.vms.Migrate(ctx, t, id, "", 0, false, [32]byte{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, id := range []cloud.VMID{"", "1", "../x", cloud.VMID("0" + string(vm.ID)), cloud.VMID("{" + string(vm.ID) + "}"), "\x00"} {
				require.True(t, fault.Is(call(w.as(acme, ""), acme, id), fault.InvalidArgument), "%q", id)
			}
			require.True(t, fault.Is(call(w.as(acme, ""), acme, newID()), fault.NotFound))
			require.True(t, fault.Is(call(w.as(other, ""), other, vm.ID), fault.NotFound), "a call for a VM of another project must return NotFound")
			wrong := cloud.Tenant{Org: other.Org, Project: acme.Project}
			require.True(t, fault.Is(call(w.as(wrong, ""), wrong, vm.ID), fault.NotFound), "a call for a VM of another org must return NotFound")
			require.Equal(t, vm, w.get(vm.ID))
		})
	}
}

// TestPowerWaitSurvivesLeaderChange makes the leader unreachable during a wait. The wait must continue and see the VM
// running.
func TestPowerWaitSurvivesLeaderChange(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Stopped, "web")
	thenLost := leader.NewCommand("test.then-lost", leader.Once, func(s *Service, ctx context.Context, q powerRequest) (powerResponse, error) {
		out, err := s.changePowerOnLeader(ctx, q)
		w.Quorum.Away.Store(true)
		return out, err
	})
	leader.Register(w.vms.opts.Commands, w.vms, thenLost)
	reported := make(chan struct{})
	go func() {
		defer close(reported)
		time.Sleep(3 * retryPause)
		w.Quorum.Away.Store(false)
		w.report(vm.ID, cloud.ObservedRunning)
	}()
	defer func() { <-reported }()
	out, err := w.vms.powerAndWait(w.as(acme, ""), thenLost, powerRequest{Tenant: acme, VM: vm.ID, Action: start}, time.Minute,
		func(_, vm *cloud.VM) (bool, error) { return vm.State == cloud.Running, nil })
	require.NoError(t, err)
	require.Equal(t, cloud.Running, out.VM.State)
}

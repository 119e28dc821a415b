package vm

import (
	"cmp"
	"context"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// How long a power call waits for the VM to reach the desired state. Stop waits for its grace period plus stopMargin.
const (
	startWait  = 30 * time.Second
	stopMargin = 10 * time.Second
	rebootWait = 75 * time.Second
	resetWait  = 30 * time.Second
)

type powerAction string

const (
	start  powerAction = "StartVm"
	stop   powerAction = "StopVm"
	reboot powerAction = "RebootVm"
	reset  powerAction = "ResetVm"
)

type powerRequest struct {
	Tenant cloud.Tenant
	VM     cloud.VMID
	Action powerAction
	// GraceMS is how long the guest may take to shut down in a stop, in milliseconds; 0 powers the VM off at once.
	GraceMS uint64
	Body    [32]byte
}

// powerResponse contains the VM after the power command. If Replayed is true, an earlier command with the same
// idempotency key was executed, and VM is the VM after that command.
type powerResponse struct {
	VM       cloud.VM
	Replayed bool
}

// powerCommand is a command that the leader runs to change the desired power state of a VM.
type powerCommand = leader.Command[*Service, powerRequest, powerResponse]

var (
	// setPowerCommand starts or stops a VM. Running it twice has the same effect as running it once.
	setPowerCommand = leader.NewCommand("vm.power", leader.Repeatable, (*Service).changePowerOnLeader)
	// pulseCommand reboots or resets a VM. Each execution does so again, so the command is sent again only with an
	// idempotency key.
	pulseCommand = leader.NewCommand("vm.press", leader.Keyed, (*Service).changePowerOnLeader)
)

// changePowerOnLeader stores the new desired power state of a VM. It does not wait for the host.
func (s *Service) changePowerOnLeader(ctx context.Context, q powerRequest) (out powerResponse, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) (err error) {
		out.VM, out.Replayed, err = store.Idempotent(tx, auth.CallerOf(ctx), store.InProject(q.Tenant.Project), string(q.Action), q.Body, func() (cloud.VM, error) {
			vm, err := getOwned(tx, q.Tenant, q.VM)
			if err != nil {
				return cloud.VM{}, err
			}
			before, state := vm.Generation, vm.State
			if q.Action == stop && q.GraceMS == 0 && vm.Migration != nil {
				if err := s.abortMigration(tx, vm); err != nil {
					return cloud.VM{}, err
				}
			}
			switch q.Action {
			case start:
				if err = cmp.Or(checkAwaited(vm), checkMaintenance(tx, vm)); err == nil {
					err = vm.Apply(cloud.StartRequested, tx.Now())
				}
			case stop:
				err = vm.Stop(q.GraceMS, tx.Now())
			case reboot:
				err = vm.Reboot()
			case reset:
				err = vm.Reset()
			}
			if err != nil {
				return cloud.VM{}, err
			}
			if vm.Generation == before && vm.State == state {
				return *vm, nil
			}
			if q.Action == start {
				if err := s.opts.Billing.Start(tx, vm); err != nil {
					return cloud.VM{}, err
				}
			}
			err = s.save(tx, vm, before)
			return *vm, err
		})
		return err
	})
	return out, err
}

// PowerResult is the result of a call that waits until a VM has reached the desired state.
type PowerResult struct {
	VM *cloud.VM
	// WaitEnded is true if the wait of the call ended before the VM reached the desired state, or if the call did not
	// wait. The desired state stays stored, and the host continues to work on it.
	WaitEnded bool
	// Replayed is true if an earlier call with the same idempotency key already changed the desired state.
	Replayed bool
}

// Start sets the desired state of a VM to on, and waits up to startWait until the VM is running.
func (s *Service) Start(ctx context.Context, t cloud.Tenant, id cloud.VMID, body [32]byte) (PowerResult, error) {
	return s.powerAndWait(ctx, setPowerCommand, powerRequest{t, id, start, 0, body}, startWait, func(_, vm *cloud.VM) (bool, error) {
		switch vm.State {
		case cloud.Running:
			return true, nil
		case cloud.Error, cloud.Failed, cloud.Stopped:
			return false, powerError(vm, "start")
		}
		if !vm.Desired.On && !vm.Desired.StartAfterStop {
			return false, fault.New(fault.FailedPrecondition, "VM %s was stopped meanwhile", vm.Name)
		}
		return false, nil
	})
}

// Stop sets the desired state of a VM to off, and waits up to grace plus stopMargin until the VM is off. The host
// presses the VM's power button, and powers the VM off if the guest has not shut down after grace. With a grace of 0 it
// powers the VM off at once.
func (s *Service) Stop(ctx context.Context, t cloud.Tenant, id cloud.VMID, grace time.Duration, body [32]byte) (PowerResult, error) {
	return s.powerAndWait(ctx, setPowerCommand, powerRequest{t, id, stop, uint64(grace.Milliseconds()), body}, grace+stopMargin, func(_, vm *cloud.VM) (bool, error) {
		switch {
		case vm.Desired.On || vm.Desired.StartAfterStop:
			return false, fault.New(fault.FailedPrecondition, "VM %s was started again meanwhile", vm.Name)
		case vm.State == cloud.Error, vm.State == cloud.Failed:
			return false, powerError(vm, "stop")
		}
		return vm.State == cloud.Stopped || vm.State == cloud.Creating || vm.State == cloud.Pending, nil
	})
}

// Reboot presses the VM's power button, and starts the VM again when the guest has shut down. If the guest does not
// shut down within 30 s, the host powers the VM off. Reboot waits up to rebootWait.
func (s *Service) Reboot(ctx context.Context, t cloud.Tenant, id cloud.VMID, body [32]byte) (PowerResult, error) {
	return s.powerAndWait(ctx, pulseCommand, powerRequest{t, id, reboot, 0, body}, rebootWait, func(asked, vm *cloud.VM) (bool, error) {
		return restarted(vm, vm.Status.RebootsDone >= asked.Desired.Reboots, "reboot")
	})
}

// Reset presses the VM's reset button, and waits up to resetWait until the host has done so.
func (s *Service) Reset(ctx context.Context, t cloud.Tenant, id cloud.VMID, body [32]byte) (PowerResult, error) {
	return s.powerAndWait(ctx, pulseCommand, powerRequest{t, id, reset, 0, body}, resetWait, func(asked, vm *cloud.VM) (bool, error) {
		return restarted(vm, vm.Status.ResetsDone >= asked.Desired.Resets, "reset")
	})
}

func restarted(vm *cloud.VM, done bool, verb string) (bool, error) {
	switch vm.State {
	case cloud.Running, cloud.Starting:
		return done && vm.State == cloud.Running, nil
	}
	return false, powerError(vm, verb)
}

// powerError returns the error for a VM that did not reach the desired state. verb is the requested action.
func powerError(vm *cloud.VM, verb string) error {
	why := vm.Status.LastError
	if why == "" {
		why = "it is " + vm.State.String()
	}
	return fault.New(fault.FailedPrecondition, "%s VM %s: %s", verb, vm.Name, why)
}

// retryPause is the pause before the next attempt to wait for a VM or to place it.
const retryPause = 100 * time.Millisecond

// powerAndWait runs a command on the leader. It then waits for at most the duration wait, until the function done
// returns true for the VM's current record on this member. The parameters of done are the VM in the leader's response,
// and the VM's current record. For a caller who prefers rpc.RespondAsync, it does not wait.
func (s *Service) powerAndWait(ctx context.Context, command *powerCommand, q powerRequest, wait time.Duration, done func(response, now *cloud.VM) (bool, error)) (PowerResult, error) {
	if err := cloud.CheckUUID("vm_id", string(q.VM)); err != nil {
		return PowerResult{}, err
	}
	response, err := command.Call(ctx, s.opts.Commands, q)
	if err != nil {
		return PowerResult{}, err
	}
	return s.awaitVM(ctx, q.Tenant, response, wait, done)
}

// awaitVM waits as powerAndWait does after the command.
func (s *Service) awaitVM(ctx context.Context, t cloud.Tenant, response powerResponse, wait time.Duration, done func(response, now *cloud.VM) (bool, error)) (PowerResult, error) {
	out := PowerResult{VM: &response.VM, Replayed: response.Replayed}
	if ok, err := done(&response.VM, &response.VM); ok && err == nil {
		return out, nil
	}
	if rpc.RespondAsync(ctx) {
		out.WaitEnded = true
		return out, nil
	}
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	// final is the error of the function check for the VM's current record. An error ends the wait.
	var final error
	check := func(vm *cloud.VM) (ok bool, err error) {
		switch {
		case vm != nil:
			if ok, err = done(&response.VM, vm); err == nil {
				out.VM = vm
			} else if response.Replayed && vm.State != cloud.Error && vm.State != cloud.Failed && !isFinal(err) {
				return true, nil // the VM has got another desired state since the first call
			}
		case response.Replayed:
			return true, nil
		default:
			err = fault.New(fault.FailedPrecondition, "VM %s was deleted meanwhile", response.VM.Name)
		}
		final = err
		return ok, err
	}
	for {
		_, err := store.Await(waiting, s.opts.Store, VMs, check, string(t.Project), string(response.VM.ID))
		switch {
		case err == nil:
			return out, nil
		case final != nil:
			return PowerResult{}, final
		case ctx.Err() != nil:
			return PowerResult{}, ctx.Err()
		case waiting.Err() == nil:
			// The desired state is stored. Wait again if no leader can be reached at the moment, or if this member has
			// received a new snapshot of the records.
			select {
			case <-time.After(retryPause):
				continue
			case <-waiting.Done():
			}
		}
		out.WaitEnded = true
		return out, ctx.Err()
	}
}

package vm

import (
	"context"
	"errors"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/auth"
	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// How long calls wait for what they asked.
const (
	startWait  = 30 * time.Second
	stopMargin = 10 * time.Second
	rebootWait = 75 * time.Second
	resetWait  = 30 * time.Second
)

type action string

const (
	start  action = "StartVm"
	stop   action = "StopVm"
	reboot action = "RebootVm"
	reset  action = "ResetVm"
)

type powerAsk struct {
	Tenant cloud.Tenant
	VM     cloud.VMID
	Action action
	// GraceMS is a stop's; 0 cuts.
	GraceMS uint64
	Body    [32]byte
}

// doPower records what is wanted.
func (s *Service) doPower(ctx context.Context, q powerAsk) (out cloud.VM, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) (err error) {
		out, _, err = store.Idempotent(tx, auth.CallerOf(ctx), string(q.Tenant.Project), string(q.Action), q.Body, func() (cloud.VM, error) {
			vm, err := of(tx, q.Tenant, q.VM)
			if err != nil {
				return cloud.VM{}, err
			}
			before, state := vm.Generation, vm.State
			switch q.Action {
			case start:
				err = vm.On(cloud.StartAsked, tx.Now())
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
			if vm.Generation != before || vm.State != state {
				save(tx, vm, before)
			}
			return *vm, nil
		})
		return err
	})
	return out, err
}

// Start wants a VM on and waits until it runs. On time-out it is given back as it is, with late true: the wish stands.
func (s *Service) Start(ctx context.Context, t cloud.Tenant, id cloud.VMID, body [32]byte) (vm *cloud.VM, late bool, err error) {
	return s.ask(ctx, powerAsk{t, id, start, 0, body}, startWait, func(_, vm *cloud.VM) (bool, error) {
		switch vm.State {
		case cloud.Running:
			return true, nil
		case cloud.Error, cloud.Failed, cloud.Stopped:
			return false, ended(vm, "start")
		}
		return false, nil
	})
}

// Stop wants a VM off: the power button, and the cut after grace; a grace of 0 cuts at once.
func (s *Service) Stop(ctx context.Context, t cloud.Tenant, id cloud.VMID, grace time.Duration, body [32]byte) (vm *cloud.VM, late bool, err error) {
	return s.ask(ctx, powerAsk{t, id, stop, uint64(grace.Milliseconds()), body}, grace+stopMargin, func(_, vm *cloud.VM) (bool, error) {
		switch {
		case vm.Wish.On || vm.Wish.Again:
			return false, fault.New(fault.FailedPrecondition, "VM %s was started again meanwhile", vm.Name)
		case vm.State == cloud.Error, vm.State == cloud.Failed:
			return false, ended(vm, "stop")
		}
		return vm.State == cloud.Stopped || vm.State == cloud.Creating || vm.State == cloud.Pending, nil
	})
}

// Reboot presses the power button, waits for the guest to go down, and starts it again; the host cuts after 30 s.
func (s *Service) Reboot(ctx context.Context, t cloud.Tenant, id cloud.VMID, body [32]byte) (vm *cloud.VM, late bool, err error) {
	return s.ask(ctx, powerAsk{t, id, reboot, 0, body}, rebootWait, func(asked, vm *cloud.VM) (bool, error) {
		return runsAgain(vm, vm.Status.RebootsDone >= asked.Wish.Reboots, "reboot")
	})
}

// Reset presses the reset button.
func (s *Service) Reset(ctx context.Context, t cloud.Tenant, id cloud.VMID, body [32]byte) (vm *cloud.VM, late bool, err error) {
	return s.ask(ctx, powerAsk{t, id, reset, 0, body}, resetWait, func(asked, vm *cloud.VM) (bool, error) {
		return runsAgain(vm, vm.Status.ResetsDone >= asked.Wish.Resets, "reset")
	})
}

func runsAgain(vm *cloud.VM, done bool, verb string) (bool, error) {
	switch vm.State {
	case cloud.Running, cloud.Starting:
		return done && vm.State == cloud.Running, nil
	}
	return false, ended(vm, verb)
}

// ended is why a wish did not come true.
func ended(vm *cloud.VM, verb string) error {
	why := vm.Status.LastError
	if why == "" {
		why = "it is " + vm.State.String()
	}
	return fault.New(fault.FailedPrecondition, "%s VM %s: %s", verb, vm.Name, why)
}

// ask records a wish and waits for it on the records of this member. done sees the VM as it was when asked, and as it is.
func (s *Service) ask(ctx context.Context, q powerAsk, wait time.Duration, done func(asked, now *cloud.VM) (bool, error)) (*cloud.VM, bool, error) {
	if err := cloud.CheckUUID("vm_id", string(q.VM)); err != nil {
		return nil, false, err
	}
	asked, err := s.power(ctx, q)
	if err != nil {
		return nil, false, err
	}
	if ok, err := done(&asked, &asked); ok && err == nil {
		return &asked, false, nil
	}
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	last := &asked
	vm, err := store.Await(waiting, s.opts.Store, VMs, func(vm *cloud.VM) (bool, error) {
		if vm == nil {
			return false, fault.New(fault.FailedPrecondition, "VM %s was deleted meanwhile", asked.Name)
		}
		last = vm
		return done(&asked, vm)
	}, string(q.Tenant.Project), string(q.VM))
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return last, true, nil
	}
	if err != nil {
		return nil, false, err
	}
	return vm, false, nil
}

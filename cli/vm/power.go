package vm

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// Deadlines of the commands unless --timeout is given. Each is the maximum time for which the control plane waits in
// that call, plus a margin.
const (
	startLimit  = 30*time.Second + waitMargin
	rebootLimit = 75*time.Second + waitMargin
	// stopExtra plus the grace period is the deadline of a stop. graceDefault and graceMost are the default and the
	// maximum grace period in seconds.
	stopExtra    = 10*time.Second + waitMargin
	graceDefault = 30
	graceMost    = 600
)

// power describes a command that changes the power state of a VM, such as start. The function do makes the API call.
type power struct {
	verb, doing string
	// want is the state that the VM must have after the call; unspecified if every state is acceptable.
	want vmv1.VmState
	do   func(context.Context, *target) (*vmv1.VirtualMachine, error)
}

var (
	start = power{"start", "starting", vmv1.VmState_VM_STATE_RUNNING, func(ctx context.Context, t *target) (*vmv1.VirtualMachine, error) {
		return t.client.StartVm(ctx, &vmv1.StartVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id})
	}}
	reboot = power{"reboot", "rebooting", vmv1.VmState_VM_STATE_RUNNING, func(ctx context.Context, t *target) (*vmv1.VirtualMachine, error) {
		return t.client.RebootVm(ctx, &vmv1.RebootVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id})
	}}
	reset = power{"reset", "resetting", vmv1.VmState_VM_STATE_UNSPECIFIED, func(ctx context.Context, t *target) (*vmv1.VirtualMachine, error) {
		return t.client.ResetVm(ctx, &vmv1.ResetVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id})
	}}
)

func stop(force bool, grace uint32) power {
	return power{"stop", "stopping", vmv1.VmState_VM_STATE_STOPPED, func(ctx context.Context, t *target) (*vmv1.VirtualMachine, error) {
		return t.client.StopVm(ctx, &vmv1.StopVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id, Force: force, TimeoutSeconds: grace})
	}}
}

func powerCommands(s *session.Session) []*cobra.Command {
	simple := func(p power, short string, limit time.Duration) *cobra.Command {
		c := vmArgCommand(s, p.verb+" VM", short)
		c.RunE = s.Run(limit, func(ctx context.Context, conn *dial.Conn, args []string) error {
			return p.command(ctx, s, conn, args[0])
		})
		return c
	}
	var force bool
	var grace uint32
	stopping := vmArgCommand(s, "stop VM", "Shut a VM down, and power it off if it does not")
	stopping.Flags().BoolVar(&force, "force", false, "power it off at once")
	stopping.Flags().Uint32Var(&grace, "grace", graceDefault, "seconds that the guest has to shut down, 1 to 600")
	stopping.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		if grace < 1 || grace > graceMost {
			return session.Usagef("--grace %d: want 1 to %d seconds", grace, graceMost)
		}
		ctx, cancel := s.Limit(ctx, time.Duration(grace)*time.Second+stopExtra)
		defer cancel()
		return stop(force, grace).command(ctx, s, conn, args[0])
	})
	return []*cobra.Command{
		simple(start, "Start a VM, and wait until it runs", startLimit),
		stopping,
		simple(reboot, "Shut a VM down and start it again", rebootLimit),
		simple(reset, "Reset a VM without shutting it down", startLimit),
	}
}

func (p power) command(ctx context.Context, s *session.Session, conn *dial.Conn, nameOrID string) error {
	t, err := find(ctx, s, conn, nameOrID)
	if err != nil {
		return err
	}
	vm, err := p.run(ctx, s, t, nameOrID)
	if err != nil {
		return err
	}
	return s.Print(vm, []string{vm.GetName()}, func(w io.Writer) error { return rows(w, s.Now(), vm) })
}

// run makes the call, in which the control plane waits until the VM has the wanted state. If the VM does not have it in
// time, the control plane returns the VM in another state, without an error. run then returns an error, so that a
// script stops.
func (p power) run(ctx context.Context, s *session.Session, t *target, name string) (vm *vmv1.VirtualMachine, err error) {
	err = s.Wait(p.doing+" "+name, func(func(string)) error {
		vm, err = p.do(ctx, t)
		return err
	})
	if err == nil && p.want != vmv1.VmState_VM_STATE_UNSPECIFIED && vm.GetState() != p.want {
		err = fmt.Errorf("%s is still %s; the request is still in effect: watch it with `trivet vm watch %s`", name, cmp.Or(state(vm.GetState()), "of unknown state"), name)
	}
	return vm, err
}

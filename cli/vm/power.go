package vm

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

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
	// goesOn says of a VM that the operation is being carried out.
	goesOn string
	// want is the state that the VM must have after the call; unspecified if every state is acceptable.
	want vmv1.VmState
	do   func(context.Context, *target) (*vmv1.VirtualMachine, error)
}

var (
	start = power{"start", "starting", "is still being started", vmv1.VmState_VM_STATE_RUNNING, func(ctx context.Context, t *target) (*vmv1.VirtualMachine, error) {
		return t.client.StartVm(ctx, &vmv1.StartVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id})
	}}
	reboot = power{"reboot", "rebooting", "is still being rebooted", vmv1.VmState_VM_STATE_RUNNING, func(ctx context.Context, t *target) (*vmv1.VirtualMachine, error) {
		return t.client.RebootVm(ctx, &vmv1.RebootVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id})
	}}
	reset = power{"reset", "resetting", "may still be reset", vmv1.VmState_VM_STATE_UNSPECIFIED, func(ctx context.Context, t *target) (*vmv1.VirtualMachine, error) {
		return t.client.ResetVm(ctx, &vmv1.ResetVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id})
	}}
)

func stop(force bool, grace uint32) power {
	return power{"stop", "stopping", "is still being stopped", vmv1.VmState_VM_STATE_STOPPED, func(ctx context.Context, t *target) (*vmv1.VirtualMachine, error) {
		return t.client.StopVm(ctx, &vmv1.StopVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id, Force: force, TimeoutSeconds: grace})
	}}
}

func powerCommands(s *session.Session) []*cobra.Command {
	simple := func(p power, short string, limit time.Duration) *cobra.Command {
		x := &selection{}
		c := x.command(s, p.verb, short)
		x.wait.Add(c, true)
		c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
			return p.each(ctx, s, conn, x, limit, args)
		})
		return c
	}
	var force bool
	grace := session.Seconds(graceDefault)
	x := &selection{}
	stopping := x.command(s, "stop", "Shut VMs down, and power them off if they do not")
	x.wait.Add(stopping, true)
	stopping.Flags().BoolVar(&force, "force", false, "power them off at once")
	stopping.Flags().Var(&grace, "grace", "time that the guest has to shut down, 1s to 10m")
	stopping.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		if grace > graceMost {
			return session.Usagef("--grace %s: want 1s to 10m", &grace)
		}
		return stop(force, uint32(grace)).each(ctx, s, conn, x, time.Duration(grace)*time.Second+stopExtra, args)
	})
	return []*cobra.Command{
		simple(start, "Start VMs", startLimit),
		stopping,
		simple(reboot, "Shut VMs down and start them again", rebootLimit),
		simple(reset, "Reset VMs without shutting them down", startLimit),
	}
}

// each applies p to the VMs in args, or to those that x selects, one after the other, and prints those for which it
// succeeded. limit is the deadline for each VM unless --timeout is given.
func (p power) each(ctx context.Context, s *session.Session, conn *dial.Conn, x *selection, limit time.Duration, args []string) error {
	names, err := x.names(ctx, s, conn, p.verb, args)
	if err != nil {
		return err
	}
	var done []*vmv1.VirtualMachine
	err = s.Each(ctx, limit, names, func(ctx context.Context, name string) error {
		t, err := find(ctx, s, conn, name)
		if err != nil {
			return err
		}
		vm, err := p.run(ctx, s, t, name, &x.wait)
		if err == nil {
			done = append(done, vm)
		}
		return err
	})
	if len(done) == 0 {
		return err
	}
	ctx, cancel := s.PrintContext(ctx)
	defer cancel()
	if printed := printVMs(ctx, s, conn, len(args) == 1, done); printed != nil && err == nil {
		err = printed
	}
	return err
}

// run makes the call, in which the control plane waits until the VM has the wanted state, unless the command does not wait.
// If the VM does not have it in time, the control plane returns the VM in another state, without an error. run then
// returns an error, so that a script stops.
func (p power) run(ctx context.Context, s *session.Session, t *target, name string, wait *session.Waiting) (vm *vmv1.VirtualMachine, err error) {
	look := "trivet vm show " + name
	if p.want != vmv1.VmState_VM_STATE_UNSPECIFIED {
		look = fmt.Sprintf("trivet vm wait %s --for %s", name, state(p.want))
	}
	err = s.WaitOngoing(p.doing+" "+name, session.Ongoing{What: name + " " + p.goesOn, Look: look}, func(func(string)) error {
		vm, err = p.do(wait.Context(ctx), t)
		return err
	})
	if err == nil && wait.On() && p.want != vmv1.VmState_VM_STATE_UNSPECIFIED && vm.GetState() != p.want {
		err = session.Errorf(codes.DeadlineExceeded, "`"+look+"` waits for it", "%s is still %s; the request is still in effect",
			name, cmp.Or(state(vm.GetState()), "of unknown state"))
	}
	return vm, err
}

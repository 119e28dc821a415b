package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// waitLimit is the deadline of `trivet vm wait` for each VM unless --timeout is given.
const waitLimit = 5 * time.Minute

func waitCommand(s *session.Session) *cobra.Command {
	var want string
	c := vmsCommand(s, "wait VM...", "Wait until VMs have a state")
	c.Long = `Wait until VMs have a state, one VM after the other. The command fails if a VM is deleted, or goes to ERROR or FAILED,
before it has the state. With --for DELETED it waits until the VMs are deleted.`
	c.Example = `  trivet vm wait web --for RUNNING --timeout 2m
  trivet vm wait web db --for STOPPED,ERROR`
	c.Flags().StringVar(&want, "for", "", "state, or several states separated by commas: "+strings.Join(stateNames(), ", "))
	_ = c.RegisterFlagCompletionFunc("for", cobra.FixedCompletions(stateNames(), cobra.ShellCompDirectiveNoFileComp)) // its only error is for an unknown flag
	session.Require(c, "for")
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		states, err := parseStates(want)
		if err != nil {
			return err
		}
		var done []*vmv1.VirtualMachine
		err = s.Each(ctx, waitLimit, args, func(ctx context.Context, name string) error {
			vm, err := waitFor(ctx, s, conn, name, states)
			if err == nil && vm == nil {
				return s.Done(name, "is deleted")
			}
			if err == nil {
				done = append(done, vm)
			}
			return err
		})
		if len(done) > 0 {
			ctx, cancel := s.PrintContext(ctx)
			defer cancel()
			err = errors.Join(err, printVMs(ctx, s, conn, len(args) == 1, done))
		}
		return err
	})
	return c
}

// stateNames returns the names of the states that a VM can have.
func stateNames() (names []string) {
	for n := int32(1); vmv1.VmState_name[n] != ""; n++ {
		names = append(names, state(vmv1.VmState(n)))
	}
	return names
}

// parseStates parses names of states that are separated by commas, in any case.
func parseStates(text string) (states []vmv1.VmState, err error) {
	for name := range strings.SplitSeq(text, ",") {
		n := vmv1.VmState_value["VM_STATE_"+strings.ToUpper(strings.TrimSpace(name))]
		if n == 0 {
			return nil, session.Usagef("--for %q: want one of %s", name, strings.Join(stateNames(), ", "))
		}
		states = append(states, vmv1.VmState(n))
	}
	return states, nil
}

// waitFor waits until the VM with a name or ID has one of the states, and returns it. It returns nil for a VM that is
// deleted, if DELETED is one of the states.
func waitFor(ctx context.Context, s *session.Session, conn *dial.Conn, nameOrID string, states []vmv1.VmState) (*vmv1.VirtualMachine, error) {
	t, err := find(ctx, s, conn, nameOrID)
	if err != nil {
		if deleted := slices.Contains(states, vmv1.VmState_VM_STATE_DELETED); deleted && isNotFound(err) {
			return nil, nil
		}
		return nil, err
	}
	w := &waiter{target: t, name: nameOrID, states: states}
	return w.run(ctx, s, conn, "waiting for "+nameOrID)
}

// isNotFound reports whether err means that a VM does not exist. It returns false if the project does not exist.
func isNotFound(err error) bool {
	var p *session.Problem
	if errors.As(err, &p) {
		return p.Code == codes.NotFound
	}
	return status.Code(err) == codes.NotFound && !hasReason(err, "TENANT_NOT_FOUND")
}

// waiter follows the events of a VM until the VM has one of the wanted states.
type waiter struct {
	target *target
	name   string
	states []vmv1.VmState
	// ongoing describes the operation that continues in the cloud if the wait ends early. Optional.
	ongoing session.Ongoing
	vm      *vmv1.VirtualMachine
	say     func(string)
}

// run waits and returns the VM, or nil if it is deleted and DELETED is a wanted state. It shows text and the state of
// the VM in the status line.
func (w *waiter) run(ctx context.Context, s *session.Session, conn *dial.Conn, text string) (*vmv1.VirtualMachine, error) {
	err := s.WaitOngoing(text, w.ongoing, func(say func(string)) error {
		w.say = func(state string) { say(text + ": " + state) }
		return session.Follow(ctx, conn, w.stream)
	})
	if isNotFound(err) && slices.Contains(w.states, vmv1.VmState_VM_STATE_DELETED) {
		return nil, nil
	}
	if status.Code(err) == codes.DeadlineExceeded || errors.Is(err, context.DeadlineExceeded) {
		hint := fmt.Sprintf("--timeout sets a longer deadline; `trivet vm show %s` shows why it has this state", w.name)
		if w.ongoing.Look != "" {
			hint = "`" + w.ongoing.Look + "` waits for it"
		}
		err = session.Errorf(codes.DeadlineExceeded, hint, "%s is still %s", w.name, state(w.vm.GetState()))
	}
	return w.vm, err
}

func (w *waiter) stream(ctx context.Context, heard func()) error {
	t := w.target
	stream, err := t.client.WatchVm(ctx, &vmv1.WatchVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id})
	if err != nil {
		return err
	}
	for {
		e, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return session.ErrStreamEnded
		}
		if err != nil {
			return err
		}
		heard()
		w.vm = e.GetVm()
		now := w.vm.GetState()
		w.say(state(now))
		switch {
		case slices.Contains(w.states, now):
			return nil
		case now == vmv1.VmState_VM_STATE_DELETED || e.GetEventType() == vmv1.VmEventType_VM_EVENT_TYPE_DELETED:
			return session.NotFound("", "%s was deleted", w.name)
		case now == vmv1.VmState_VM_STATE_ERROR || now == vmv1.VmState_VM_STATE_FAILED:
			message := fmt.Sprintf("%s is in the state %s", w.name, state(now))
			if why := w.vm.GetStatus().GetLastError(); why != "" {
				message += ": " + why
			}
			return session.Errorf(codes.OK, "`trivet vm show "+w.name+"` shows more", "%s", message)
		}
	}
}

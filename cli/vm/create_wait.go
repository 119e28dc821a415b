package vm

import (
	"context"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// createLimit is the deadline of `trivet vm create` unless --timeout is given. A host may need minutes to copy an image.
const createLimit = 10 * time.Minute

// settle waits until the disks of a new VM are complete and, with --start, starts the VM and waits until it runs. With
// --no-wait it does not wait.
func (f *createFlags) settle(ctx context.Context, s *session.Session, conn *dial.Conn, t *target, vm *vmv1.VirtualMachine) (*vmv1.VirtualMachine, error) {
	name := vm.GetName()
	w := &waiter{target: t, name: name, states: []vmv1.VmState{vmv1.VmState_VM_STATE_STOPPED, vmv1.VmState_VM_STATE_RUNNING},
		ongoing: session.Ongoing{What: name + " is still being created", Look: "trivet vm wait " + name + " --for STOPPED"}}
	if f.start {
		w.states = []vmv1.VmState{vmv1.VmState_VM_STATE_RUNNING}
		w.ongoing = session.Ongoing{What: name + " is still being created and started", Look: "trivet vm wait " + name + " --for RUNNING"}
		err := s.WaitOngoing("starting "+name, w.ongoing, func(func(string)) (err error) {
			vm, err = start.do(f.wait.Context(ctx), t)
			return err
		})
		if err != nil {
			s.Note("%s is created with the ID %s, but is not started", name, t.id)
			return nil, err
		}
	}
	if !f.wait.On() || slices.Contains(w.states, vm.GetState()) {
		return vm, nil
	}
	return w.run(ctx, s, conn, "creating "+name)
}

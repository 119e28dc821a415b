package vm

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

func recoverCommand(s *session.Session) *cobra.Command {
	var start bool
	var wait session.Waiting
	c := vmsCommand(s, "recover VM...", "Move VMs from a lost host to other hosts")
	c.Long = `Move a VM from a lost host to another host. A VM that was running is started there.

The VM's host must be fenced: either its lease has ended and it has confirmed to stop this VM then, or an operator has
confirmed with "trivet host fence" that it is off. All disks of the VM must be volumes that other hosts can use. VMs with
the metadata trivet/ha=restart are moved without this command.

Until the VM has another host, it is PENDING, and "trivet vm show" shows the reason. With --wait the command returns when
the VM is STOPPED or RUNNING on the other host, with --start when it is RUNNING.`
	c.Flags().BoolVar(&start, "start", false, "start the VM also if it was off")
	wait.Add(c, false)
	body := func(ctx context.Context, conn *dial.Conn, name string) error {
		t, err := find(ctx, s, conn, name)
		if err != nil {
			return err
		}
		vm, err := t.client.RecoverVm(ctx, &vmv1.RecoverVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id, Start: start})
		if err != nil {
			return err
		}
		if wait.On() {
			w := &waiter{target: t, name: name, states: []vmv1.VmState{vmv1.VmState_VM_STATE_RUNNING},
				ongoing: session.Ongoing{What: name + " is still being moved", Look: "trivet vm wait " + name + " --for RUNNING"}}
			if !start {
				w.states = append(w.states, vmv1.VmState_VM_STATE_STOPPED)
				w.ongoing.Look += ",STOPPED"
			}
			if vm, err = w.run(ctx, s, conn, "recovering "+name); err != nil {
				return err
			}
		}
		return printVM(ctx, s, conn, vm)
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		limit := callTimeout
		if wait.On() {
			limit = waitLimit
		}
		return s.RunEach(limit, body)(c, args)
	}
	return c
}

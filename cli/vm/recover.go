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
	c := vmsCommand(s, "recover VM...", "Move VMs from a lost host to other hosts")
	c.Long = `Move a VM from a lost host to another host. A VM that was running is started there.

The VM's host must be fenced: either its lease has ended and it has confirmed to stop this VM then, or an operator has
confirmed with "trivet host fence" that it is off. All disks of the VM must be volumes that other hosts can use. VMs with
the metadata trivet/ha=restart are moved without this command.

The command does not wait for the other host. Until the VM has one, it is PENDING, and "trivet vm show" shows the reason.`
	c.Flags().BoolVar(&start, "start", false, "start the VM also if it was off")
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		t, err := find(ctx, s, conn, name)
		if err != nil {
			return err
		}
		vm, err := t.client.RecoverVm(ctx, &vmv1.RecoverVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id, Start: start})
		if err != nil {
			return err
		}
		return printVM(ctx, s, conn, vm)
	})
	return c
}

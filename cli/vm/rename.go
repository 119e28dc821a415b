package vm

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
)

func renameCommand(s *session.Session) *cobra.Command {
	c := vmArgCommand(s, "rename VM NAME", "Change the name of a VM")
	c.Args = session.Exactly("VM", "NAME")
	c.Long = `Change the name of a VM, in any state but MIGRATING. Other guests then find the VM in DNS by its new name. A guest that
uses DHCP or cloud-init gets the name as its host name when it renews its DHCP lease or starts again.`
	c.Example = "  trivet vm rename web web-old"
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		t, err := find(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		out, err := operatorv1.NewOperatorServiceClient(conn).RenameVm(ctx, &operatorv1.RenameVmRequest{
			OrgId: t.org, ProjectId: t.project, VmId: t.id, Name: args[1],
		})
		if err != nil {
			return err
		}
		return printVM(ctx, s, conn, out.GetVm())
	})
	return c
}

package node

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
)

func fenceCommand(s *session.Session) *cobra.Command {
	r := &operatorv1.FenceNodeRequest{}
	c := &cobra.Command{
		Use:   "fence HOST --confirmed-off",
		Short: "Confirm that a lost host is off, so that its VMs can start on other hosts",
		Long: `Confirm that a host that does not answer is off. Its VMs can then start on other hosts, if all their disks are volumes
that other hosts can use: VMs with the metadata trivet/ha=restart by themselves, other VMs with "trivet vm recover".

Make sure first that the host is off, or that it cannot run its VMs, for example at its management controller. If it
still runs a VM, the VM can run twice. If the host answers again, the control plane tells it to destroy the VMs that
have moved, and the confirmation is removed.

The command fails if the host has answered in the last 15 seconds. It takes one host, because each must be checked.`,
		Args: session.Exactly("HOST"), ValidArgsFunction: session.FirstArg(hosts.Names(s)),
	}
	c.Flags().BoolVar(&r.ConfirmedOff, "confirmed-off", false, "required: the host is off, or cannot run its VMs")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) (err error) {
		if !r.ConfirmedOff {
			return session.Usagef("make sure that the host is off, and then give --confirmed-off")
		}
		if r.NodeId, err = Find(ctx, conn, args[0]); err != nil {
			return err
		}
		a, err := operatorv1.NewOperatorServiceClient(conn).FenceNode(ctx, r)
		if err != nil {
			return err
		}
		s.Note("%d VMs were placed on the host", a.GetVms())
		return s.Done(args[0], "fenced")
	})
	return c
}

package vm

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

func updateCommand(s *session.Session) *cobra.Command {
	var labels, metadata []string
	c := vmArgCommand(s, "update VM", "Change the labels and the metadata of a VM")
	c.Long = `Change the labels and the metadata of a VM, in any state. Pairs that are not given stay. An empty value removes a pair.
"trivet vm resize" changes processors and memory.`
	c.Example = `  trivet vm update web --metadata trivet/guest-exec=allowed
  trivet vm update web --label env=prod --label old=`
	c.Flags().StringArrayVar(&labels, "label", nil, "KEY=VALUE, or KEY= to remove the label, repeatable")
	c.Flags().StringArrayVar(&metadata, "metadata", nil, "KEY=VALUE, or KEY= to remove the pair, repeatable")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		req := &vmv1.UpdateVmRequest{}
		var err error
		if req.Labels, err = session.Pairs("label", labels); err != nil {
			return err
		}
		if req.Metadata, err = session.Pairs("metadata", metadata); err != nil {
			return err
		}
		if len(req.GetLabels()) == 0 && len(req.GetMetadata()) == 0 {
			return session.Usagef("want --label or --metadata")
		}
		t, err := find(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		req.OrgId, req.ProjectId, req.VmId = t.org, t.project, t.id
		vm, err := t.client.UpdateVm(ctx, req)
		if err != nil {
			return err
		}
		return s.Print(vm, []string{vm.GetName()}, func(w io.Writer) error { return rows(w, s.Now(), vm) })
	})
	return c
}

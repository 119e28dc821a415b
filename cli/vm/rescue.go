package vm

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/image"
	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func rescueCommand(s *session.Session) *cobra.Command {
	var from string
	var end bool
	var wait session.Waiting
	c := vmArgCommand(s, "rescue VM", "Boot a VM from a rescue image, or end that")
	c.Long = `Boot a VM from a rescue image, to repair its disks.

With --image, the VM is stopped and started from a new disk with the content of the image. The VM's own disks come after
it. The rescue disk is made anew at each start, and is deleted when the rescue ends: repairs must be written to the VM's
own disks. With --end, the VM is stopped and started from its own disks again. With --no-wait, the command waits until the VM
is stopped, but not until it runs.`
	c.Example = `  trivet vm rescue web --image debian
  trivet vm rescue web --end`
	c.Flags().StringVar(&from, "image", "", "image from which the VM boots, by name or ID")
	c.Flags().BoolVar(&end, "end", false, "boot the VM from its own disks again")
	wait.Add(c, true)
	_ = c.RegisterFlagCompletionFunc("image", image.Names(s)) // its only error is for an unknown flag
	limit := callTimeout + graceDefault*time.Second + stopExtra + startLimit
	c.RunE = s.Run(limit, func(ctx context.Context, conn *dial.Conn, args []string) error {
		if (from == "") != end {
			return session.Usagef("give either --image or --end")
		}
		t, err := find(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		id := "" // removes the key
		if from != "" {
			if id, err = image.Find(ctx, s, conn, from); err != nil {
				return err
			}
		}
		if _, err := stop(false, graceDefault).run(ctx, s, t, args[0], &session.Waiting{}); err != nil {
			return err
		}
		if _, err := t.client.UpdateVm(ctx, &vmv1.UpdateVmRequest{
			OrgId: t.org, ProjectId: t.project, VmId: t.id, Metadata: map[string]string{cloud.RescueKey: id},
		}); err != nil {
			s.Note("%s is stopped: start it with `trivet vm start %s`", args[0], args[0])
			return err
		}
		vm, err := start.run(ctx, s, t, args[0], &wait)
		if err != nil {
			return err
		}
		return printVM(ctx, s, conn, vm)
	})
	return c
}

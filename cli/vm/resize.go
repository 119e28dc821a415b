package vm

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
)

const sizeHelp = `The host of the VM must have room for a new number of processors and a new size of
the memory.

A VM that is STOPPED has the new size at once. A VM that runs gets it at its next start or reboot. Until then,
"trivet vm show" shows it as "At the next start", and the larger of both sizes counts in the quota. To take a resize back,
resize the VM to its present size.`

const typeHelp = `

With --type, the VM gets the processors and the memory of an instance type ("trivet instance-type list"), unless --vcpus
and --memory are given. Its disks do not change.`

func resizeCommand(s *session.Session) *cobra.Command {
	var x size
	c := vmArgCommand(s, "resize VM", "Change the processors and the memory of a VM")
	c.Long = "Change the processors and the memory of a VM. " + sizeHelp + typeHelp
	c.Example = `  trivet vm resize web --vcpus 4 --memory 8G
  trivet vm resize web --type large
  trivet vm reboot web`
	x.add(s, c)
	session.RequireOne(c, "type", "vcpus", "memory")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		var to change
		if err := x.addTo(c, &to); err != nil {
			return err
		}
		return to.apply(ctx, s, conn, args[0])
	})
	return c
}

package vm

import (
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// completeDevice returns the shell completion for a command with the arguments VM and DEVICE. ids returns the IDs of a
// VM's disks or NICs.
func completeDevice(s *session.Session, ids func(*vmv1.VirtualMachine) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		switch len(args) {
		case 0:
			return vmArgCommand(s, "", "").ValidArgsFunction(cmd, args, prefix)
		case 1:
			return s.Names(func(ctx context.Context, conn *dial.Conn) ([]string, error) {
				vm, _, err := readVM(ctx, s, conn, args[0])
				return ids(vm), err
			})(cmd, args, prefix)
		}
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
}

// runDetach returns the RunE function of a command with the arguments VM and DEVICE. The function calls detach with the
// VM and the device, and detach returns the VM and the ID of the device. ids returns the IDs of the devices that the VM
// still has: without waiting, a guest that runs may still use the device. limit is the deadline unless --timeout is given. wait has the flags of the command.
func runDetach(
	s *session.Session, limit time.Duration, wait *session.Waiting, ids func(*vmv1.VirtualMachine) []string,
	detach func(ctx context.Context, conn *dial.Conn, t *target, device string) (vm *vmv1.VirtualMachine, id string, err error),
) func(*cobra.Command, []string) error {
	return s.Run(limit, func(ctx context.Context, conn *dial.Conn, args []string) error {
		t, err := find(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		goesOn := session.Ongoing{What: args[1] + " may still be detached", Look: "trivet vm show " + args[0]}
		var vm *vmv1.VirtualMachine
		var id string
		err = s.WaitOngoing("detaching "+args[1], goesOn, func(func(string)) (err error) {
			vm, id, err = detach(wait.Context(ctx), conn, t, args[1])
			return err
		})
		if err != nil {
			return err
		}
		if slices.Contains(ids(vm), id) {
			return s.Done(args[1], "is being detached")
		}
		return s.Done(args[1], "detached")
	})
}

// Package vm holds the commands for VMs: `trivet vm`. It uses package image to look up the images of a new VM, and package
// network for its NICs. Every command for one VM accepts its name or its ID. A name is unique in its project; package
// lookup finds it with the filter of ListVms.
package vm

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/vm/lookup"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

const (
	// callTimeout is the deadline of commands that do not wait for a host, unless --timeout is given.
	callTimeout = 30 * time.Second
	// waitMargin is added to the maximum time for which the control plane waits in a call, to get the deadline of a
	// command.
	waitMargin = 15 * time.Second
)

// Command returns the command `trivet vm`.
func Command(s *session.Session) *cobra.Command {
	c := &cobra.Command{Use: "vm", Short: "Create, run and watch VMs", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	list := listCommand(s)
	list.Aliases = append(list.Aliases, "ps")
	c.AddCommand(createCommand(s), list, showCommand(s), deleteCommand(s), watchCommand(s), waitCommand(s), labelCommand(s), renameCommand(s), editCommand(s), logCommand(s), nicCommand(s),
		diskCommand(s), recoverCommand(s), rescueCommand(s), resizeCommand(s), updateCommand(s), migrateCommand(s),
		consoleCommand(s), vncCommand(s), screenshotCommand(s), execCommand(s), setPasswordCommand(s), addSSHKeyCommand(s))
	c.AddCommand(powerCommands(s)...)
	return c
}

func deleteCommand(s *session.Session) *cobra.Command {
	var force bool
	x := &selection{}
	c := x.command(s, "delete", "Delete VMs and their disks")
	x.wait.Add(c, true)
	c.Flags().BoolVar(&force, "force", false, "power them off first, and delete them even if their hosts are unreachable")
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		names, err := x.names(ctx, s, conn, "delete", args)
		if err != nil {
			return err
		}
		return s.Each(ctx, callTimeout+waitMargin, names, func(ctx context.Context, name string) error {
			t, err := find(ctx, s, conn, name)
			if err != nil {
				return err
			}
			req := &vmv1.DeleteVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id, Force: force}
			goesOn := session.Ongoing{What: name + " may still be deleted", Look: "trivet vm show " + name}
			if err := s.WaitOngoing("deleting "+name, goesOn, func(func(string)) error {
				_, err := t.client.DeleteVm(x.wait.Context(ctx), req)
				return err
			}); err != nil {
				return err
			}
			return s.Done(name, "deleted")
		})
	})
	return c
}

// vmsCommand returns a command with one or more arguments VM, names or IDs, and shell completion for them.
func vmsCommand(s *session.Session, use, short string) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Args: session.AtLeast("VM"), ValidArgsFunction: session.AnyArg(lookup.Names(s))}
}

// vmArgCommand returns a command with the single argument VM, a name or an ID, and shell completion for it.
func vmArgCommand(s *session.Session, use, short string) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Args: session.Exactly("VM"), ValidArgsFunction: session.FirstArg(lookup.Names(s))}
}

// target identifies the VM that a command is for, and holds a client for calls about that VM.
type target struct {
	client           vmv1.VmServiceClient
	org, project, id string
}

// find returns the target for the name or the ID of a VM. For a name, it looks up the ID.
func find(ctx context.Context, s *session.Session, conn *dial.Conn, nameOrID string) (*target, error) {
	t := &target{client: vmv1.NewVmServiceClient(conn)}
	t.org, t.project = s.Tenant()
	var err error
	t.id, err = lookup.Find(ctx, s, conn, nameOrID)
	return t, err
}

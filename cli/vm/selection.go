package vm

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/vm/lookup"
)

// maxAsked is the maximum number of VMs that a question names.
const maxAsked = 20

// selection holds the flags that select VMs for a command that changes several VMs.
type selection struct {
	labels   list.Labels
	all, yes bool
	// wait is set only for commands that wait for hosts.
	wait session.Waiting
}

// command returns a command whose arguments are VMs, or which selects VMs by the flags in x.
func (x *selection) command(s *session.Session, verb, short string) *cobra.Command {
	c := vmsCommand(s, verb+" VM...", short)
	c.Args = func(_ *cobra.Command, args []string) error {
		switch selected := len(x.labels) > 0 || x.all; {
		case selected && len(args) > 0:
			return session.Usagef("give VMs, or select them with --label or --all, not both")
		case len(x.labels) > 0 && x.all:
			return session.Usagef("--label and --all cannot be combined")
		case !selected && len(args) == 0:
			return session.Usagef("VM is missing: give one or more, or select them with --label or --all")
		}
		return nil
	}
	x.labels.Add(c, "all VMs")
	c.Flags().BoolVar(&x.all, "all", false, "all VMs of the project")
	c.Flags().BoolVarP(&x.yes, "yes", "y", false, "with --label or --all: do not ask")
	return c
}

// names returns the VMs to which verb is applied: the arguments, or the names of the selected VMs. For selected VMs, it
// asks the user first, unless --yes is given.
func (x *selection) names(ctx context.Context, s *session.Session, conn *dial.Conn, verb string, args []string) ([]string, error) {
	if len(args) > 0 {
		return args, nil
	}
	filter, err := x.labels.Filter()
	if err != nil {
		return nil, err
	}
	limited, cancel := s.Limit(ctx, callTimeout)
	defer cancel()
	vms, _, err := lookup.All(limited, s, conn, filter, 0)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, vm := range vms {
		names = append(names, vm.GetName())
	}
	if len(names) == 0 {
		return nil, session.NotFound("`trivet vm list --columns name,labels` shows the labels", "no VM is selected")
	}
	if x.yes {
		return names, nil
	}
	listed := strings.Join(names[:min(len(names), maxAsked)], ", ")
	if len(names) > maxAsked {
		listed += fmt.Sprintf(" and %d more", len(names)-maxAsked)
	}
	if len(names) == 1 {
		return names, s.Confirm(ctx, verb+" the VM "+listed)
	}
	return names, s.Confirm(ctx, fmt.Sprintf("%s %d VMs: %s", verb, len(names), listed))
}

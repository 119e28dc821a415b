package node

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// drainPoll is the time between two reads of the progress of a drain.
const drainPoll = time.Second

// maxDrainWait is the deadline of `trivet host drain --wait`. It is longer than the maximum timeout of a drain.
const maxDrainWait = 25 * time.Hour

// Values of operator.v1.Drain.phase and operator.v1.DrainedVm.status.
const (
	phaseMoving     = "MOVING"
	phaseIncomplete = "INCOMPLETE"

	statusMoving       = "MOVING"
	statusCannotMove   = "CANNOT_MOVE"
	statusShuttingDown = "SHUTTING_DOWN"
	statusShutDown     = "SHUT_DOWN"
	statusStays        = "STAYS"
	statusMoved        = "MOVED"
)

// DrainFlags are the flags of commands that drain hosts.
type DrainFlags struct {
	Force  bool
	Within time.Duration
}

// Add adds the flags to c.
func (f *DrainFlags) Add(c *cobra.Command) {
	c.Flags().BoolVar(&f.Force, "force", false, "shut VMs down that cannot be moved, after the others have left")
	c.Flags().DurationVar(&f.Within, "within", 0, "give up after this time (default 1h); the host is then CORDONED, and VMs still on it keep running")
}

// Request returns the request to drain a host. It returns a *Usage error if the flags are invalid.
func (f *DrainFlags) Request(id string) (*vmv1.DrainNodeRequest, error) {
	if f.Within < 0 || f.Within%time.Second != 0 || f.Within > 24*time.Hour {
		return nil, session.Usagef("--within %s: want whole seconds, at most 24h", f.Within)
	}
	return &vmv1.DrainNodeRequest{NodeId: id, Force: f.Force, TimeoutSeconds: uint32(f.Within / time.Second)}, nil
}

func drainCommand(s *session.Session) *cobra.Command {
	var f DrainFlags
	var cancel bool
	var wait session.Waiting
	c := &cobra.Command{
		Use: "drain HOST", Short: "Move all VMs that run on a host to other hosts",
		Long: `Move all VMs that run on a host to other hosts, for example before a reboot. No VM is placed on the host meanwhile. When
no VM runs on it any more, the host is in MAINTENANCE: no VM can be started on it until "trivet host uncordon".

The command returns when the drain has begun. The control plane carries it out, and "trivet host show" shows the
progress. With --wait the command shows the progress, and returns when the host is in MAINTENANCE. If the command is
interrupted, the drain goes on.

VMs that cannot be moved go on running, and the drain names them with the reason. With --force they are shut down after
the other VMs have left. They stay stopped: start them when the maintenance has ended. A stopped VM gets another
host if all its disks are volumes that other hosts can use; other VMs that do not run stay on the host. If VMs run on the host when the time of --within has passed, the drain ends, and the host is CORDONED.`,
		Example: `  trivet host drain host1 --wait
  trivet host drain host1 --force --within 30m
  trivet host drain host1 --cancel`,
		Args: session.Exactly("HOST"), ValidArgsFunction: session.FirstArg(hosts.Names(s)),
	}
	f.Add(c)
	wait.Add(c, false)
	c.Flags().BoolVar(&cancel, "cancel", false, "end the drain; the host stays cordoned, and migrations that have begun go on")
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		ctx, end := s.Limit(ctx, map[bool]time.Duration{false: callTimeout, true: maxDrainWait}[wait.On()])
		defer end()
		id, err := Find(ctx, conn, args[0])
		if err != nil {
			return err
		}
		if cancel {
			if wait.On() || f.Force || f.Within != 0 {
				return session.Usagef("--cancel cannot be used with --wait, --force and --within")
			}
			if _, err := operatorv1.NewOperatorServiceClient(conn).CancelDrain(ctx, &operatorv1.CancelDrainRequest{NodeId: id}); err != nil {
				return err
			}
			n, err := vmv1.NewNodeServiceClient(conn).GetNode(ctx, &vmv1.GetNodeRequest{NodeId: id})
			if err != nil {
				return err
			}
			return hosts.PrintOne(ctx, s, conn, n)
		}
		request, err := f.Request(id)
		if err != nil {
			return err
		}
		n, err := vmv1.NewNodeServiceClient(conn).DrainNode(ctx, request)
		if err != nil {
			return err
		}
		if wait.On() {
			if err := AwaitDrained(ctx, s, conn, id, n.GetName()); err != nil {
				return err
			}
			if n, err = vmv1.NewNodeServiceClient(conn).GetNode(ctx, &vmv1.GetNodeRequest{NodeId: id}); err != nil {
				return err
			}
		}
		return hosts.PrintOne(ctx, s, conn, n)
	})
	return c
}

// AwaitDrained shows the progress of the drain of a host, and returns when no VM runs on the host any more. It returns
// an error if the drain has ended before that. It notes each VM that cannot be moved once, with the reason.
func AwaitDrained(ctx context.Context, s *session.Session, conn *dial.Conn, id, name string) error {
	client, noted := operatorv1.NewOperatorServiceClient(conn), map[string]bool{}
	goesOn := session.Ongoing{What: "the drain of " + name + " goes on, and --cancel ends it", Look: "trivet host show " + name}
	return s.WaitOngoing("draining "+name, goesOn, func(progress func(string)) error {
		for {
			out, err := client.GetDrain(ctx, &operatorv1.GetDrainRequest{NodeId: id})
			if err != nil {
				return err
			}
			d := out.GetDrain()
			for _, vm := range d.GetVms() {
				if vm.GetStatus() == statusCannotMove && !noted[vm.GetVmId()] {
					noted[vm.GetVmId()] = true
					s.Note("%s cannot be moved: %s", vm.GetName(), vm.GetReason())
				}
			}
			switch {
			case d == nil:
				return fmt.Errorf("%s was uncordoned before the drain finished", name)
			case d.GetPhase() == phaseIncomplete:
				return fmt.Errorf("%s is not drained: %s", name, d.GetResult())
			case d.GetPhase() != phaseMoving:
				return nil
			}
			progress(drainText(d))
			select {
			case <-time.After(drainPoll):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
}

// drainText describes the progress of a drain in one line.
func drainText(d *operatorv1.Drain) string {
	count := map[string]int{}
	all := 0
	var moving []string
	for _, vm := range d.GetVms() {
		count[vm.GetStatus()]++
		if vm.GetStatus() != statusStays {
			all++
		}
		if vm.GetStatus() == statusMoving {
			moving = append(moving, vm.GetName()+" "+movingText(vm))
		}
	}
	parts := []string{fmt.Sprintf("moved %d of %d VMs", count[statusMoved], all)}
	if len(moving) > 0 {
		parts = append(parts, "moving "+strings.Join(moving, ", "))
	}
	for _, one := range []struct{ status, text string }{
		{statusCannotMove, "%d cannot be moved"}, {statusShuttingDown, "%d being shut down"}, {statusShutDown, "%d shut down"},
	} {
		if n := count[one.status]; n > 0 {
			parts = append(parts, fmt.Sprintf(one.text, n))
		}
	}
	return strings.Join(parts, "; ")
}

// movingText returns the target of a VM that is being moved and how much was sent, if that is known.
func movingText(vm *operatorv1.DrainedVm) string {
	text := "to " + vm.GetTo()
	if total := vm.GetTotalBytes(); total > 0 {
		text += fmt.Sprintf(" (%d %%)", min(vm.GetSentBytes(), total)*100/total)
	}
	return text
}

// printDrain prints the drain of a host with its VMs. It prints nothing if the host was not drained.
func printDrain(w io.Writer, form show.Form, d *operatorv1.Drain) error {
	if d == nil {
		return nil
	}
	f := [][2]string{
		{"Drain", fmt.Sprintf("%s, requested by %s at %s", d.GetPhase(), d.GetRequestedBy(), show.When(d.GetBeganAt()))},
	}
	if d.GetPhase() == phaseMoving {
		f = append(f, [2]string{"Ends", show.When(d.GetDeadline())})
	} else {
		f = append(f, [2]string{"Ended", show.When(d.GetEndedAt())}, [2]string{"Result", d.GetResult()})
	}
	if d.GetForce() {
		f = append(f, [2]string{"Force", "VMs that cannot be moved are shut down"})
	}
	f = append(f, [2]string{"Progress", drainText(d)})
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	if err := show.Fields(w, f); err != nil || len(d.GetVms()) == 0 {
		return err
	}
	rows := make([][]string, len(d.GetVms()))
	for i, vm := range d.GetVms() {
		about := vm.GetReason()
		switch vm.GetStatus() {
		case statusMoving:
			about = movingText(vm)
		case statusMoved:
			about = "to " + vm.GetTo()
		}
		tenant := vm.GetOrgId() + "/" + vm.GetProjectId()
		if form == show.Wide {
			rows[i] = []string{vm.GetName(), tenant, vm.GetVmId(), vm.GetStatus(), about}
		} else {
			rows[i] = []string{vm.GetName(), show.Shorten(tenant, 20), vm.GetStatus(), about}
		}
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	header := []string{"DRAINED VM", "TENANT", "STATUS", "ABOUT"}
	if form == show.Wide {
		header = slices.Insert(header, 2, "ID")
	}
	return show.WrapRows(w, form, header, rows)
}

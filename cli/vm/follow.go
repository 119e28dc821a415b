package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/console"
	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/node"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

func watchCommand(s *session.Session) *cobra.Command {
	c := vmsCommand(s, "watch VM...", "Print the events of VMs until they are deleted or you interrupt")
	c.Long = `Print the events of VMs until all of them are deleted or you interrupt. With several VMs, each line has the name of its
VM. "trivet vm list -w" prints the changes of all VMs of the project.`
	c.Example = "  trivet vm watch web\n  trivet vm watch web db -o json"
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		p := &eventPrinter{session: s, hosts: node.NameOf(ctx, conn)}
		var watches []*watch
		for _, name := range args {
			t, err := find(ctx, s, conn, name)
			if err != nil {
				return err
			}
			if slices.ContainsFunc(watches, func(w *watch) bool { return w.target.id == t.id }) {
				continue // the VM is named twice
			}
			watches = append(watches, &watch{conn: conn, target: t, printer: p})
		}
		if len(watches) == 1 {
			return session.Interruptible(ctx, watches[0].run(ctx))
		}
		p.named = true
		return session.Interruptible(ctx, watchAll(ctx, watches))
	})
	return c
}

// watchAll runs the watches at the same time. If one of them fails, watchAll ends the others and returns the error.
func watchAll(ctx context.Context, all []*watch) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, w := range all {
		w.conn = w.conn.Clone()
		w.target.client = vmv1.NewVmServiceClient(w.conn)
		group.Go(func() error {
			defer w.conn.Close()
			return w.run(ctx)
		})
	}
	return group.Wait()
}

// watch follows the events of one VM.
type watch struct {
	conn    *dial.Conn
	target  *target
	last    *vmv1.VmEvent
	printer *eventPrinter
}

// eventPrinter prints the events of one or more VMs, for several goroutines.
type eventPrinter struct {
	session *session.Session
	// hosts returns the name of a host by its ID.
	hosts func(id string) string
	// named is true if a line contains the name of its VM.
	named bool

	mu sync.Mutex // guards the output, and the connection that hosts uses
}

// run prints the events of a VM until the VM is deleted. If the stream of events breaks, run opens another one, perhaps
// to another member. A new stream starts with the current state of the VM, which run prints unless it has printed the
// same state before.
func (w *watch) run(ctx context.Context) error {
	err := session.Follow(ctx, w.conn, w.stream)
	if status.Code(err) == codes.NotFound && w.last != nil {
		w.printer.mu.Lock()
		defer w.printer.mu.Unlock()
		w.printer.session.Note("%s was deleted in the meantime", w.last.GetVm().GetName())
		return nil
	}
	return err
}

func (w *watch) stream(ctx context.Context, heard func()) error {
	t := w.target
	stream, err := t.client.WatchVm(ctx, &vmv1.WatchVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id})
	if err != nil {
		return err
	}
	for first := true; ; first = false {
		e, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			if w.last.GetEventType() == vmv1.VmEventType_VM_EVENT_TYPE_DELETED {
				return nil
			}
			return session.ErrStreamEnded
		}
		if err != nil {
			return err
		}
		heard()
		if first && w.last != nil && proto.Equal(w.last.GetVm(), e.GetVm()) {
			continue
		}
		w.last = e
		if err := w.printer.print(e); err != nil {
			return err
		}
	}
}

func (w *eventPrinter) print(e *vmv1.VmEvent) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	line := show.When(e.GetTimestamp())
	if w.named {
		line += fmt.Sprintf("  %-12s", e.GetVm().GetName())
	}
	line += fmt.Sprintf("  %-13s  %-9s", show.Enum("VM_EVENT_TYPE", e.GetEventType()), state(e.GetVm().GetState()))
	if id := e.GetVm().GetNodeId(); id != "" {
		line += "  on " + w.hosts(id)
	}
	if last := e.GetVm().GetStatus().GetLastError(); last != "" {
		line += "  " + last
	}
	return w.session.PrintItem(e, []string{e.GetVm().GetName()}, func(out io.Writer) error {
		_, err := fmt.Fprintln(out, show.Text(strings.TrimRight(line, " ")))
		return err
	})
}

func logCommand(s *session.Session) *cobra.Command {
	var follow, raw bool
	var tail uint64
	c := vmArgCommand(s, "log VM", "Print the tail of a VM's serial console")
	c.Long = `Print the tail of a VM's serial console log, of which the host keeps at most 1 MiB. Control sequences for the
terminal are removed.`
	c.Flags().BoolVarP(&follow, "follow", "f", false, "print new output until you interrupt")
	c.Flags().BoolVar(&raw, "raw", false, "print the guest's bytes unchanged, including control sequences")
	c.Flags().Uint64Var(&tail, "tail", 0, "start this many bytes before the end (default: all)")
	run := func(ctx context.Context, conn *dial.Conn, args []string) error {
		if !follow {
			var cancel context.CancelFunc
			ctx, cancel = s.Limit(ctx, callTimeout)
			defer cancel()
		}
		t, err := find(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		err = copyConsole(ctx, s, conn, &operatorv1.ReadConsoleLogRequest{
			OrgId: t.org, ProjectId: t.project, VmId: t.id, Follow: follow, TailBytes: tail,
		}, raw)
		if follow {
			return session.Interruptible(ctx, err)
		}
		return err
	}
	c.RunE = s.Run(0, run)
	return c
}

func copyConsole(ctx context.Context, s *session.Session, conn *dial.Conn, req *operatorv1.ReadConsoleLogRequest, raw bool) (err error) {
	out := s.Stdout
	if !raw {
		filter := console.NewFilter(out)
		defer func() { err = errors.Join(err, filter.Close()) }()
		out = filter
	}
	stream, err := operatorv1.NewOperatorServiceClient(conn).ReadConsoleLog(ctx, req)
	if err != nil {
		return err
	}
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if _, err := out.Write(chunk.GetData()); err != nil {
			return fmt.Errorf("write the log: %w", err)
		}
	}
}

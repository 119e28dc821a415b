// Package console opens the consoles of VMs for users: the serial port and the display in both directions, and pictures
// of the display. [Service] implements ConsoleService of console.v1 and the websocket of the REST API for VMs.
//
// The bytes of a console pass the member that was called, the leader, and the stream that the host's agent opens to the
// leader (package node). The host decides which session may write to a serial port, because it also knows the sessions
// of an earlier leader.
//
// Decisions:
//   - A browser cannot send a token when it opens a websocket, and a token in a URL could get into logs. So the URL
//     contains a ticket, which is valid for one minute and for one connection ([Service.CreateTicket]).
//   - A ticket is a record, so that it can be used on any member and only once. The record has only the hash of the
//     ticket's secret. The record also holds the user's token, encrypted with a key derived from the secret: the server
//     rechecks the token every second while the console is open.
//   - Cross-origin requests are accepted, because a ticket and not a cookie authorizes the request.
//   - The offsets of a serial port's output refer to the log on one host. Clients that continue the output name the log.
//   - The audit record of a session is written when the console is opened. The end of the session is not recorded. A
//     console that could not be opened is recorded as a failed call.
//
// The package does not interpret the bytes of consoles.
package console

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/delay"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// VMs looks up VMs. Get returns NotFound if the tenant t has no such VM.
type VMs interface {
	Get(ctx context.Context, t cloud.Tenant, id cloud.VMID) (*cloud.VM, error)
}

// Hosts opens consoles on hosts. Package node implements it.
type Hosts interface {
	OpenConsole(ctx context.Context, q node.ConsoleRequest, pipe node.ConsolePipe) error
}

// Options configures New. All fields are required.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	VMs      VMs
	Hosts    Hosts
	// Verifier verifies the tokens of users that open a websocket.
	Verifier auth.Verifier
	// OpenStream counts a websocket against the limits of open streams of its caller. The returned context ends, with a
	// fault as its cause, when the token becomes invalid or the caller loses the right to the call.
	OpenStream func(ctx context.Context, token string) (_ context.Context, leave func(), err error)
	Audit      auth.Auditor
	Log        *slog.Logger
}

// Service opens consoles.
type Service struct {
	opts    Options
	sockets sockets
	// attempts limits the rate at which each client network uses tickets, because these calls need no token.
	attempts *delay.Answers
}

// attemptLimits are the limits of the use of tickets, per client network. Each attempt costs a command of the leader.
var attemptLimits = delay.Limits{Burst: 100, Every: 100 * time.Millisecond}

// New creates the service and registers its commands with opts.Commands.
func New(opts Options) *Service {
	s := &Service{opts: opts, attempts: delay.New(attemptLimits)}
	s.sockets.open, s.sockets.close = context.WithCancelCause(context.Background())
	leader.Register(opts.Commands, s, createTicketCommand, lookupTicketCommand, redeemTicketCommand)
	return s
}

// maxTail is the maximum size of the existing output of a serial port that is sent first, in bytes.
const maxTail = 1 << 20

// Session describes a console that a user opens.
type Session struct {
	VM         cloud.VMID
	Kind       agentv1.ConsoleKind
	ReadOnly   bool
	TakeOver   bool
	TailBytes  uint64
	FromOffset *int64
	// FromLog is the log to which FromOffset refers, or empty for the log on the present host. If the VM has moved to
	// another host since, FromOffset is ignored, and TailBytes applies.
	FromLog string
}

// check returns InvalidArgument if a field is invalid.
func (q *Session) check() error {
	switch {
	case q.TailBytes > maxTail:
		return fault.Invalid("tail_bytes", "at most %d", maxTail)
	case q.FromOffset != nil && *q.FromOffset < 0:
		return fault.Invalid("from_offset", "must not be negative")
	case q.ReadOnly && q.TakeOver:
		return fault.Invalid("take_over", "read_only and take_over exclude each other")
	}
	if q.Kind != agentv1.ConsoleKind_CONSOLE_KIND_SERIAL {
		for field, set := range map[string]bool{
			"read_only": q.ReadOnly, "take_over": q.TakeOver, "tail_bytes": q.TailBytes > 0, "from_offset": q.FromOffset != nil, "from_log": q.FromLog != "",
		} {
			if set {
				return fault.Invalid(field, "only valid for CONSOLE_KIND_SERIAL")
			}
		}
	}
	return cloud.CheckUUID("vm_id", string(q.VM))
}

// Attach opens a console of a VM of the tenant t and copies data over pipe until one side ends. It writes an audit record
// when the console is open. It returns the errors of AttachConsole in console.v1.
func (s *Service) Attach(ctx context.Context, t cloud.Tenant, q Session, pipe node.ConsolePipe) error {
	if err := q.check(); err != nil {
		return err
	}
	vm, err := s.placed(ctx, t, q.VM)
	if err != nil {
		return err
	}
	if q.FromLog != "" && q.FromLog != string(vm.Node) {
		q.FromOffset = nil
	}
	var opened, closed atomic.Bool // closed by the user
	err = s.opts.Hosts.OpenConsole(ctx, node.ConsoleRequest{
		Tenant: t, Node: vm.Node, VM: vm.ID, Kind: q.Kind, ReadOnly: q.ReadOnly, TakeOver: q.TakeOver, TailBytes: q.TailBytes, FromOffset: q.FromOffset,
	}, node.ConsolePipe{
		Recv: func(ctx context.Context) ([]byte, error) {
			data, err := pipe.Recv(ctx)
			if errors.Is(err, io.EOF) {
				closed.Store(true)
			}
			return data, err
		},
		Send: func(out node.ConsoleOutput) error {
			out.Log = string(vm.Node)
			if opened.CompareAndSwap(false, true) {
				s.opts.Audit.Done(auth.CallerOf(ctx))
			}
			return pipe.Send(out)
		},
	})
	if c := auth.CallerOf(ctx); c != nil {
		c.Recorded = opened.Load()
	}
	if err != nil || closed.Load() {
		return err
	}
	return s.checkMoved(ctx, t, vm)
}

// checkMoved returns Unavailable if the VM is on another host than before, or migrates. Its process on the host before
// has ended then, but the VM has not stopped.
func (s *Service) checkMoved(ctx context.Context, t cloud.Tenant, before *cloud.VM) error {
	now, err := s.opts.VMs.Get(ctx, t, before.ID)
	if fault.Is(err, fault.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if now.Migration != nil || now.Node != before.Node && now.Node != "" {
		return fault.New(fault.Unavailable, "VM %s has moved to another host: open the console again", now.Name).MayRetry()
	}
	return nil
}

// Screenshot calls send with the parts of a PNG file of the display of a VM. It returns the errors of ReadScreenshot in
// console.v1.
func (s *Service) Screenshot(ctx context.Context, t cloud.Tenant, id cloud.VMID, send func([]byte) error) error {
	q := Session{VM: id, Kind: agentv1.ConsoleKind_CONSOLE_KIND_SCREENSHOT}
	if err := q.check(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, screenshotTime)
	defer cancel()
	vm, err := s.placed(ctx, t, q.VM)
	if err != nil {
		return err
	}
	return s.opts.Hosts.OpenConsole(ctx, node.ConsoleRequest{Tenant: t, Node: vm.Node, VM: vm.ID, Kind: q.Kind}, node.ConsolePipe{
		Recv: func(ctx context.Context) ([]byte, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		},
		Send: func(out node.ConsoleOutput) error {
			if len(out.Data) == 0 {
				return nil
			}
			return send(out.Data)
		},
	})
}

// screenshotTime is the maximum duration of a screenshot.
const screenshotTime = 30 * time.Second

// placed returns a VM, or FailedPrecondition if the VM has no host.
func (s *Service) placed(ctx context.Context, t cloud.Tenant, id cloud.VMID) (*cloud.VM, error) {
	vm, err := s.opts.VMs.Get(ctx, t, id)
	if err != nil {
		return nil, err
	}
	if vm.Node == "" {
		return nil, fault.New(fault.FailedPrecondition, "VM %s is not placed on a host yet", vm.Name)
	}
	return vm, nil
}

// sockets are the open websockets of a member.
type sockets struct {
	// open ends when the member stops. close ends it.
	open  context.Context
	close context.CancelCauseFunc

	mu      sync.Mutex // orders begin and Run
	running sync.WaitGroup
}

// errStopping returns the error for a websocket of a member that stops.
func errStopping() error {
	return fault.New(fault.Unavailable, "this member is stopping: use another one").MayRetry()
}

// Run closes the websockets of this member when ctx ends, and waits for them. net/http does not track them.
func (s *Service) Run(ctx context.Context) {
	<-ctx.Done()
	s.sockets.mu.Lock()
	s.sockets.close(errStopping())
	s.sockets.mu.Unlock()
	s.sockets.running.Wait()
}

// begin returns a context that also ends when the member stops. The caller must call end.
func (s *sockets) begin(ctx context.Context) (_ context.Context, end func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open.Err() != nil {
		return nil, nil, context.Cause(s.open)
	}
	s.running.Add(1)
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.open, func() { cancel(context.Cause(s.open)) })
	return ctx, func() {
		stop()
		cancel(nil)
		s.running.Done()
	}, nil
}

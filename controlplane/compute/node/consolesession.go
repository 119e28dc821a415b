package node

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/fxamacker/cbor/v2"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of the open consoles on one host: in total, of one VM, one project and one org. An agent has the same total
// limit.
const (
	maxOpenConsoles        = 64
	maxVMOpenConsoles      = 8
	maxProjectOpenConsoles = 16
	maxOrgOpenConsoles     = 32
)

// MaxConsoleInput is the maximum size of one piece of data for a console, in bytes.
const MaxConsoleInput = 32 << 10

const (
	// consoleIdleTime is the time after which a console is closed if no byte is sent in either direction.
	consoleIdleTime = 30 * time.Minute
	// consoleReadTime is the maximum time in which a user must read a piece of output.
	consoleReadTime = time.Minute
	// consoleDrainTime is the maximum time in which the host writes the rest of the input after the user has closed the
	// console.
	consoleDrainTime = 10 * time.Second
)

// agentStarting is the reason of an agent that has not found the VM since it started.
const agentStarting = "AGENT_STARTING"

// consoleLost is the reason of an agent whose connection to the serial port broke although QEMU runs.
const consoleLost = "CONSOLE_LOST"

// consoleReasons are the reasons of errors that callers get from an agent.
var consoleReasons = []string{"CONSOLE_IN_USE", "CONSOLE_TAKEN_OVER", "NO_DISPLAY"}

func newOpenConsoles() *hostReads {
	return &hostReads{
		plural: "open consoles", object: "the VM", reason: "TOO_MANY_SESSIONS", perHost: maxOpenConsoles, perProject: maxProjectOpenConsoles,
		perOrg: maxOrgOpenConsoles, perVM: maxVMOpenConsoles, open: map[string]*hostRead{},
	}
}

// ConsoleRequest describes a console that is opened. The fields have the meaning of those of OpenConsoleRequest in
// agent.v1.
type ConsoleRequest struct {
	Tenant     cloud.Tenant
	Node       cloud.NodeID
	VM         cloud.VMID
	Kind       agentv1.ConsoleKind
	ReadOnly   bool
	TakeOver   bool
	TailBytes  uint64
	FromOffset *int64
}

// ConsoleOutput is a piece of data of a console. The first one has no data: it says that the console is open.
type ConsoleOutput struct {
	Data   []byte `cbor:",omitempty"`
	Offset int64  `cbor:",omitempty"`
	// Log is the log to which Offset refers. Package console sets it.
	Log string `cbor:"-"`
}

// ConsolePipe is the user's end of an open console. One goroutine may call Recv while another one calls Send.
type ConsolePipe struct {
	// Recv returns the next data of the user, at most MaxConsoleInput bytes, and io.EOF when the user has closed the
	// console.
	Recv func(context.Context) ([]byte, error)
	Send func(ConsoleOutput) error
}

// OpenConsole opens a console of a VM on its host, and copies data in both directions. It forwards the request to the
// leader, to which the host is connected. It returns nil when the user has closed the console, or the VM has stopped.
// Errors:
//   - Unavailable: the connection to the host broke.
//   - FailedPrecondition: the agent is too old.
//   - ResourceExhausted: there are too many open consoles.
//   - DeadlineExceeded: no byte was sent for consoleIdleTime, or the user did not read for consoleReadTime. In the
//     second case, a call of pipe.Send may still be blocked when OpenConsole returns.
func (s *Service) OpenConsole(ctx context.Context, q ConsoleRequest, pipe ConsolePipe) error {
	send := sendWithin(consoleReadTime, pipe.Send)
	opened := make(chan struct{})
	open := sync.OnceFunc(func() { close(opened) })
	return openConsoleCommand.Call(ctx, s.opts.Commands, q, leader.Pipe{
		Recv: func(ctx context.Context) ([]byte, error) {
			// Input that is received before the console is open would be lost if the request has to be sent again, to
			// another leader.
			select {
			case <-opened:
				return pipe.Recv(ctx)
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		},
		Send: func(data []byte) error {
			var out ConsoleOutput
			if err := cbor.Unmarshal(data, &out); err != nil {
				return fmt.Errorf("decode data of a console: %w", err)
			}
			open()
			return send(out)
		},
	})
}

// sendWithin returns a function that calls send. It returns DeadlineExceeded if send does not return within limit. It
// does not wait for send then, because send returns only when the user reads or the handler of the call has returned.
func sendWithin(limit time.Duration, send func(ConsoleOutput) error) func(ConsoleOutput) error {
	return func(out ConsoleOutput) error {
		sent := make(chan error, 1)
		go func() { sent <- send(out) }()
		late := time.NewTimer(limit)
		defer late.Stop()
		select {
		case err := <-sent:
			return err
		case <-late.C:
			return fault.New(fault.DeadlineExceeded, "the console was closed because its output was not read for %s: open it again", limit).
				WithReason("CONSOLE_IDLE")
		}
	}
}

var openConsoleCommand = leader.NewExchange("node.open-console", (*Service).openConsoleOnLeader)

// openConsoleOnLeader implements OpenConsole on the leader.
func (s *Service) openConsoleOnLeader(ctx context.Context, q ConsoleRequest, pipe leader.Pipe) error {
	s.mu.Lock()
	agent := s.sessions[q.Node]
	s.mu.Unlock()
	if agent == nil {
		return fault.New(fault.Unavailable, "the host of the VM is not connected").MayRetry()
	}
	if err := s.checkAgent(q.Node, cloud.FeatureConsoles, "open consoles"); err != nil {
		return err
	}
	id := rand.Text()
	one, err := s.openConsoles.add(id, q.Node, q.Tenant, q.VM)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var reading sync.WaitGroup
	defer reading.Wait()
	defer cancel()
	defer s.openConsoles.remove(id)
	agent.enqueue(&agentv1.OpenConsoleRequest{
		RequestId: id, VmId: string(q.VM), Kind: q.Kind, ReadOnly: q.ReadOnly, TakeOver: q.TakeOver, TailBytes: q.TailBytes, FromOffset: q.FromOffset,
	})
	defer agent.cancelRequest(&agentv1.OpenConsoleRequest{RequestId: id, Cancel: true})
	console := &openConsole{one: one, pipe: pipe, typed: make(chan struct{}, 1), ended: make(chan error, 1)}
	reading.Go(func() { console.ended <- console.copyInput(ctx) })
	return console.copyOutput(ctx)
}

// openConsole is an open console on the leader.
type openConsole struct {
	one  *hostRead
	pipe leader.Pipe
	// typed has a value after data of the user was passed to the host. ended gets the result of copyInput.
	typed chan struct{}
	ended chan error
}

// copyInput passes the user's data to the agent's stream. It returns nil when the user has closed the console.
func (c *openConsole) copyInput(ctx context.Context) error {
	for {
		data, err := c.pipe.Recv(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if len(data) > MaxConsoleInput {
			return fault.Invalid("data", "at most %d bytes in a message", MaxConsoleInput)
		}
		select {
		case c.one.input <- data:
		case <-ctx.Done():
			return ctx.Err()
		}
		select {
		case c.typed <- struct{}{}:
		default:
		}
	}
}

// copyOutput sends the data of the agent's stream to the user until the stream ends, the user closes the console, or
// nothing is sent for consoleIdleTime.
func (c *openConsole) copyOutput(ctx context.Context) error {
	late := time.NewTimer(acceptTimeout)
	defer late.Stop()
	var closing <-chan time.Time // gets a value when the time for the rest of the input has ended
	idle := time.NewTimer(consoleIdleTime)
	defer idle.Stop()
	accepted := c.one.accepted
	for {
		select {
		case <-accepted:
			accepted = nil
			late.Stop()
		case <-late.C:
			return fault.New(fault.Unavailable, "the host of the VM does not answer").MayRetry()
		case <-idle.C:
			return fault.New(fault.DeadlineExceeded, "the console was closed because nothing was sent or received for 30 minutes: open it again").
				WithReason("CONSOLE_IDLE")
		case <-ctx.Done():
			return ctx.Err()
		case err := <-c.ended:
			if err != nil {
				return err
			}
			// The agent writes the input that it has received, and then ends its stream.
			drain := time.NewTimer(consoleDrainTime)
			defer drain.Stop()
			closing = drain.C
			close(c.one.inputEnded)
		case <-closing:
			return fault.New(fault.DeadlineExceeded, "the console was closed, but the VM has not read all input within %s", consoleDrainTime)
		case <-c.typed:
			idle.Reset(consoleIdleTime)
		case p := <-c.one.chunks:
			if errors.Is(p.err, io.EOF) {
				return nil
			}
			if p.err != nil {
				return p.err
			}
			data, err := cbor.Marshal(ConsoleOutput{Data: p.data, Offset: p.offset})
			if err != nil {
				return fmt.Errorf("encode data of a console: %w", err)
			}
			if err := c.pipe.Send(data); err != nil {
				return err
			}
			idle.Reset(consoleIdleTime)
		}
	}
}

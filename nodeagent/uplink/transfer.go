package uplink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/trivet-cloud/trivet/nodeagent/console"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

// transfers sends data of one kind, such as consoles, snapshots or results of guest agents, that the control plane requests. Each request is executed in
// its own goroutine, until the session ends.
type transfers struct {
	kind string // in the plural, for messages: "consoles"
	max  int    // the maximum number of concurrent transfers
	log  *slog.Logger

	mu    sync.Mutex // guards the fields below
	ctx   context.Context
	agent agentv1.AgentServiceClient
	// running counts the transfers of the present session.
	running *sync.WaitGroup
	open    map[string]context.CancelFunc // by request id
}

// cancelWait is the maximum wait of cancelAll. A read from a file system that does not respond, for example a hard
// mount of NFS without its server, cannot be interrupted.
const cancelWait = 5 * time.Second

// agentBusy is the reason of the error for a request that exceeds the maximum number of concurrent transfers.
const agentBusy = "AGENT_BUSY"

func newTransfers(kind string, most int, log *slog.Logger) *transfers {
	return &transfers{kind: kind, max: most, log: log, running: &sync.WaitGroup{}, open: map[string]context.CancelFunc{}}
}

// transfer is a request of the control plane.
type transfer struct {
	id  string
	log []any // attributes of log messages about the transfer
	// open opens the stream to the member.
	open func(context.Context, agentv1.AgentServiceClient) (sendStream, error)
	// write writes the data to the stream. Its error is sent to the reader. A nil function means that the host does not
	// serve the kind.
	write func(context.Context, sendStream) error
}

// sendStream is a stream of messages to a member.
type sendStream interface {
	// sendID sends the first message, sendData a piece of the data, and sendProblem the error that ends the data early.
	// reason is a constant for the member, or empty.
	sendID(id string) error
	sendData([]byte) error
	sendProblem(text, reason string) error
	// closeAndRecv ends the stream and waits for the member's response.
	closeAndRecv() error
}

// memberStream is a sendStream of messages of type Q. The function message returns a message.
type memberStream[Q, P any] struct {
	stream  grpc.ClientStreamingClient[Q, P]
	message func(id string, data []byte, problem, reason string) *Q
}

func (s *memberStream[Q, P]) sendID(id string) error {
	return s.stream.Send(s.message(id, nil, "", ""))
}
func (s *memberStream[Q, P]) sendData(data []byte) error {
	return s.stream.Send(s.message("", data, "", ""))
}
func (s *memberStream[Q, P]) sendProblem(text, reason string) error {
	return s.stream.Send(s.message("", nil, text, reason))
}
func (s *memberStream[Q, P]) closeAndRecv() (err error) { _, err = s.stream.CloseAndRecv(); return err }

// setSession sets the context and the client of the session on which data is sent.
func (t *transfers) setSession(ctx context.Context, agent agentv1.AgentServiceClient) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ctx, t.agent, t.running = ctx, agent, &sync.WaitGroup{}
}

// cancelAll ends all transfers and waits for their goroutines. It waits at most cancelWait, because the agent must be
// able to begin its next session. A goroutine that is still running then ends when its read returns. Until then, its
// transfer counts in the limit of concurrent transfers.
func (t *transfers) cancelAll() {
	t.mu.Lock()
	for _, cancel := range t.open {
		cancel()
	}
	t.agent = nil
	running := t.running
	t.mu.Unlock()
	ended := make(chan struct{})
	go func() { defer close(ended); running.Wait() }()
	select {
	case <-ended:
	case <-time.After(cancelWait):
		t.log.Warn("transfers did not end in time: a file system or a process may not respond", "kind", t.kind)
	}
}

// cancel ends the transfer with a request ID.
func (t *transfers) cancel(id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if cancel, ok := t.open[id]; ok {
		cancel()
	}
}

// begin begins a transfer. It ignores a request that is already being executed.
func (t *transfers) begin(one transfer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, known := t.open[one.id]; known || t.agent == nil {
		return
	}
	if len(t.open) >= 4*t.max { // the number of error responses is limited too
		return
	}
	ctx, cancel := context.WithCancel(t.ctx)
	t.open[one.id] = cancel
	var refused error
	switch {
	case one.write == nil:
		refused = errors.New("this host's agent does not support " + t.kind)
	case len(t.open) > t.max:
		refused = &console.Refusal{
			Reason: agentBusy, Text: fmt.Sprintf("this host has %d %s in progress, which is the maximum: try again", t.max, t.kind),
		}
	}
	agent := t.agent
	t.running.Go(func() {
		defer func() {
			cancel()
			t.mu.Lock()
			delete(t.open, one.id)
			t.mu.Unlock()
		}()
		if err := one.run(ctx, agent, refused); err != nil && ctx.Err() == nil {
			t.log.Warn("cannot send data that a member requested", append([]any{"kind", t.kind, "req", one.id, "err", err}, one.log...)...)
		}
	})
}

// run sends the data of the transfer. If refused is not nil, it sends this error instead.
func (one *transfer) run(ctx context.Context, agent agentv1.AgentServiceClient, refused error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := one.open(ctx, agent)
	if err != nil {
		return err
	}
	if err := stream.sendID(one.id); err != nil {
		return err
	}
	if refused == nil {
		refused = one.write(ctx, stream)
	}
	if refused != nil && ctx.Err() == nil {
		reason := ""
		var refusal *console.Refusal
		if errors.As(refused, &refusal) {
			reason = refusal.Reason
		}
		if err := stream.sendProblem(refused.Error(), reason); err != nil {
			return err
		}
	}
	stop := time.AfterFunc(callTimeout, cancel)
	defer stop.Stop()
	return stream.closeAndRecv()
}

// pieces is an io.Writer that sends data in pieces of at most chunk bytes. Write blocks while the receiver does not
// read.
type pieces struct {
	stream sendStream
	chunk  int
	// before is called before each piece with its length. It may wait. An error ends the transfer.
	before func(length int) error
}

var _ io.Writer = (*pieces)(nil)

func (w *pieces) Write(p []byte) (sent int, err error) {
	for sent < len(p) {
		piece := p[sent:min(len(p), sent+w.chunk)]
		if err := w.before(len(piece)); err != nil {
			return sent, err
		}
		if err := w.stream.sendData(piece); err != nil {
			return sent, err
		}
		sent += len(piece)
	}
	return sent, nil
}

package uplink

import (
	"context"
	"errors"
	"io"

	"github.com/trivet-cloud/trivet/nodeagent/console"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

const (
	// maxConsoleStreams is the maximum number of consoles that are open concurrently. The control plane has the same
	// limit, and a lower one for each VM and tenant.
	maxConsoleStreams = 64
	// displayRate is the maximum average rate at which the data of one display is sent, in bytes per second. The first
	// displayBurst bytes are sent without this limit.
	displayRate  = 4 << 20
	displayBurst = 16 << 20
)

// openConsole opens the console that r requests, or closes it if r is a cancellation.
func (l *Link) openConsole(r *agentv1.OpenConsoleRequest) {
	if r.GetCancel() {
		l.consoleStreams.cancel(r.GetRequestId())
		return
	}
	one := transfer{id: r.GetRequestId(), log: []any{"vm", r.GetVmId()}}
	one.open = func(ctx context.Context, agent agentv1.AgentServiceClient) (sendStream, error) {
		stream, err := agent.StreamConsole(ctx)
		if err != nil {
			return nil, err
		}
		s := &consoleStream{stream, make(chan consoleInput)}
		go s.receive(ctx)
		return s, nil
	}
	if l.o.OpenConsole != nil {
		one.write = func(ctx context.Context, stream sendStream) error {
			pipe := newConsolePipe(ctx, stream.(*consoleStream), r.GetKind())
			err := l.o.OpenConsole(ctx, r, pipe)
			var refusal *console.Refusal
			if errors.As(err, &refusal) {
				return pipe.stream.Send(&agentv1.StreamConsoleRequest{Error: refusal.Text, Reason: refusal.Reason})
			}
			return err
		}
	}
	l.consoleStreams.begin(one)
}

// consoleStream is the sendStream of a console.
type consoleStream struct {
	agentv1.AgentService_StreamConsoleClient
	received chan consoleInput
}

// consoleInput is the data of a message of the member, or the error that ended the stream.
type consoleInput struct {
	data []byte
	end  bool // no data follows
	err  error
}

// receive passes the messages of the member to the channel received, until the stream or ctx ends.
func (s *consoleStream) receive(ctx context.Context) {
	for {
		message, err := s.Recv()
		select {
		case s.received <- consoleInput{message.GetData(), message.GetEnd(), err}:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

func (s *consoleStream) sendID(id string) error {
	return s.Send(&agentv1.StreamConsoleRequest{RequestId: id})
}

func (s *consoleStream) sendData(data []byte) error {
	return s.Send(&agentv1.StreamConsoleRequest{Data: data})
}

func (s *consoleStream) sendProblem(text, reason string) error {
	return s.Send(&agentv1.StreamConsoleRequest{Error: text, Reason: reason})
}

// closeAndRecv drops the data that the member still sends.
func (s *consoleStream) closeAndRecv() error {
	if err := s.CloseSend(); err != nil {
		return err
	}
	for {
		select {
		case r := <-s.received:
			if errors.Is(r.err, io.EOF) {
				return nil
			}
			if r.err != nil {
				return r.err
			}
		case <-s.Context().Done():
			return s.Context().Err()
		}
	}
}

// consolePipe is the console.Pipe of a stream.
type consolePipe struct {
	stream *consoleStream
	limit  *throttle
}

var _ console.Pipe = (*consolePipe)(nil)

func newConsolePipe(ctx context.Context, stream *consoleStream, kind agentv1.ConsoleKind) *consolePipe {
	limit := newThrottle(ctx, displayRate, displayBurst)
	if kind == agentv1.ConsoleKind_CONSOLE_KIND_SERIAL {
		limit = newThrottle(ctx, consoleRate, consoleBurst)
	}
	return &consolePipe{stream, limit}
}

// Recv implements console.Pipe.
func (p *consolePipe) Recv(ctx context.Context) ([]byte, error) {
	select {
	case r := <-p.stream.received:
		if r.end {
			return nil, io.EOF
		}
		return r.data, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Send implements console.Pipe. It sends pieces of at most consoleChunk bytes.
func (p *consolePipe) Send(data []byte, offset int64) error {
	for first := true; first || len(data) > 0; first = false {
		piece := data[:min(len(data), consoleChunk)]
		data = data[len(piece):]
		if err := p.limit.wait(len(piece)); err != nil {
			return err
		}
		message := &agentv1.StreamConsoleRequest{Data: piece}
		if offset > 0 {
			message.Offset = offset - int64(len(data))
		}
		if err := p.stream.Send(message); err != nil {
			return err
		}
	}
	return nil
}

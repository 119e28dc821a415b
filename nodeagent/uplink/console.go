package uplink

import (
	"context"
	"sync"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// maxConsoles is the maximum number of consoles that are sent concurrently. The control plane has the same limit,
	// and a lower one for each tenant.
	maxConsoles = 64
	// consoleChunk is the maximum size of one message, in bytes.
	consoleChunk = 32 << 10
	// consoleRate is the maximum average rate at which one console is sent, in bytes per second. The first consoleBurst
	// bytes are sent without this limit: a host stores no more of a console.
	consoleRate  = 256 << 10
	consoleBurst = 1 << 20
)

// consoles sends the consoles of VMs that the control plane requests, each in its own goroutine, until the session
// ends.
type consoles struct {
	o Options

	running sync.WaitGroup

	mu    sync.Mutex // guards the fields below
	ctx   context.Context
	agent agentv1.AgentServiceClient
	open  map[string]context.CancelFunc // by request id
}

func newConsoles(o Options) *consoles { return &consoles{o: o, open: map[string]context.CancelFunc{}} }

// setSession sets the context and the client of the session on which consoles are sent.
func (c *consoles) setSession(ctx context.Context, agent agentv1.AgentServiceClient) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ctx, c.agent = ctx, agent
}

// cancelAll stops sending all consoles and waits for their goroutines.
func (c *consoles) cancelAll() {
	c.mu.Lock()
	for _, cancel := range c.open {
		cancel()
	}
	c.agent = nil
	c.mu.Unlock()
	c.running.Wait()
}

// handle starts to send the console that r requests, or stops it if r is a cancellation. It ignores a request that is
// already being executed.
func (c *consoles) handle(r *agentv1.ConsoleRequest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cancel, known := c.open[r.GetRequestId()]
	switch {
	case r.GetCancel():
		if known {
			cancel()
		}
		return
	case known || c.agent == nil:
		return
	}
	ctx, cancel := context.WithCancel(c.ctx)
	c.open[r.GetRequestId()] = cancel
	refused := ""
	switch {
	case c.o.Console == nil:
		refused = "this host serves no consoles"
	case len(c.open) > maxConsoles:
		refused = "too many consoles are being read on this host"
	}
	if len(c.open) > 4*maxConsoles { // the number of error responses is limited too
		delete(c.open, r.GetRequestId())
		cancel()
		return
	}
	agent := c.agent
	c.running.Go(func() {
		defer func() {
			cancel()
			c.mu.Lock()
			delete(c.open, r.GetRequestId())
			c.mu.Unlock()
		}()
		if err := c.send(ctx, agent, r, refused); err != nil && ctx.Err() == nil {
			c.o.Log.Warn("console not sent", "vm", r.GetVmId(), "req", r.GetRequestId(), "err", err)
		}
	})
}

func (c *consoles) send(ctx context.Context, agent agentv1.AgentServiceClient, r *agentv1.ConsoleRequest, refused string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := agent.SendConsole(ctx)
	if err != nil {
		return err
	}
	if err := stream.Send(&agentv1.SendConsoleRequest{RequestId: r.GetRequestId()}); err != nil {
		return err
	}
	if refused == "" {
		w := &consoleWriter{ctx: ctx, stream: stream, credit: consoleBurst, updated: time.Now()}
		if err := c.o.Console(ctx, cloud.VMID(r.GetVmId()), r.GetTailBytes(), r.GetFollow(), w); err != nil {
			refused = err.Error()
		}
	}
	if refused != "" && ctx.Err() == nil {
		if err := stream.Send(&agentv1.SendConsoleRequest{Error: refused}); err != nil {
			return err
		}
	}
	stop := time.AfterFunc(callTimeout, cancel)
	defer stop.Stop()
	_, err = stream.CloseAndRecv()
	return err
}

type consoleStream interface {
	Send(*agentv1.SendConsoleRequest) error
}

// consoleWriter is an io.Writer that sends a console in chunks, at most at consoleRate. Write blocks while the receiver
// does not read.
type consoleWriter struct {
	ctx     context.Context
	stream  consoleStream
	credit  int // bytes that may be sent at once
	updated time.Time
}

func (w *consoleWriter) Write(p []byte) (int, error) {
	sent := 0
	for sent < len(p) {
		chunk := p[sent:min(len(p), sent+consoleChunk)]
		if err := w.throttle(len(chunk)); err != nil {
			return sent, err
		}
		if err := w.stream.Send(&agentv1.SendConsoleRequest{Data: chunk}); err != nil {
			return sent, err
		}
		sent += len(chunk)
	}
	return sent, nil
}

// throttle waits until n bytes may be sent.
func (w *consoleWriter) throttle(n int) error {
	now := time.Now()
	w.credit = min(consoleBurst, w.credit+int(now.Sub(w.updated).Seconds()*consoleRate))
	w.updated = now
	w.credit -= n
	if w.credit >= 0 {
		return w.ctx.Err()
	}
	t := time.NewTimer(time.Duration(float64(-w.credit) / consoleRate * float64(time.Second)))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-w.ctx.Done():
		return w.ctx.Err()
	}
}

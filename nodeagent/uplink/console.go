package uplink

import (
	"context"
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

// sendConsole starts to send the console that r requests, or stops it if r is a cancellation.
func (l *Link) sendConsole(r *agentv1.ConsoleRequest) {
	if r.GetCancel() {
		l.consoles.cancel(r.GetRequestId())
		return
	}
	one := transfer{id: r.GetRequestId(), log: []any{"vm", r.GetVmId()}}
	one.open = func(ctx context.Context, agent agentv1.AgentServiceClient) (sendStream, error) {
		stream, err := agent.SendConsole(ctx)
		return &memberStream[agentv1.SendConsoleRequest, agentv1.SendConsoleResponse]{stream, consoleMessage}, err
	}
	if l.o.Console != nil {
		one.write = func(ctx context.Context, stream sendStream) error {
			limit := newThrottle(ctx, consoleRate, consoleBurst)
			w := &pieces{stream, consoleChunk, limit.wait}
			return l.o.Console(ctx, cloud.VMID(r.GetVmId()), r.GetTailBytes(), r.GetFollow(), w)
		}
	}
	l.consoles.begin(one)
}

func consoleMessage(id string, data []byte, problem, _ string) *agentv1.SendConsoleRequest {
	return &agentv1.SendConsoleRequest{RequestId: id, Data: data, Error: problem}
}

// throttle limits the rate at which a console is sent.
type throttle struct {
	ctx     context.Context
	rate    float64 // bytes per second
	burst   int     // maximum of credit
	credit  int     // bytes that may be sent at once
	updated time.Time
}

// newThrottle returns a throttle for a rate in bytes per second, of which the first burst bytes are sent at once.
func newThrottle(ctx context.Context, rate float64, burst int) *throttle {
	return &throttle{ctx: ctx, rate: rate, burst: burst, credit: burst, updated: time.Now()}
}

// wait waits until n bytes may be sent.
func (w *throttle) wait(n int) error {
	now := time.Now()
	w.credit = min(w.burst, w.credit+int(now.Sub(w.updated).Seconds()*w.rate))
	w.updated = now
	w.credit -= n
	if w.credit >= 0 {
		return w.ctx.Err()
	}
	t := time.NewTimer(time.Duration(float64(-w.credit) / w.rate * float64(time.Second)))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-w.ctx.Done():
		return w.ctx.Err()
	}
}

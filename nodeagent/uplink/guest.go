package uplink

import (
	"context"
	"io"
	"time"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

const (
	// maxGuestCalls is the maximum number of concurrent calls of guest agents. The control plane has the same limit, and
	// a lower one for each tenant.
	maxGuestCalls = 16
	// guestChunk is the maximum size of one message, in bytes.
	guestChunk = 64 << 10
	// guestSilence is the time after which an empty message is sent while the host waits for a guest. The member ends a
	// call that is silent for longer than 30 s.
	guestSilence = 5 * time.Second
)

// callGuest begins the call of a guest agent that r requests, or stops it if r is a cancellation.
func (l *Link) callGuest(r *agentv1.GuestRequest) {
	if r.GetCancel() {
		l.guests.cancel(r.GetRequestId())
		return
	}
	one := transfer{id: r.GetRequestId(), log: []any{"vm", r.GetVmId()}}
	one.open = func(ctx context.Context, agent agentv1.AgentServiceClient) (sendStream, error) {
		stream, err := agent.SendGuestResult(ctx)
		return &memberStream[agentv1.SendGuestResultRequest, agentv1.SendGuestResultResponse]{stream, guestMessage}, err
	}
	if l.o.Guest != nil {
		one.write = func(ctx context.Context, stream sendStream) error { return l.writeGuestResult(ctx, r, stream) }
	}
	l.guests.begin(one)
}

func guestMessage(id string, data []byte, problem, reason string) *agentv1.SendGuestResultRequest {
	return &agentv1.SendGuestResultRequest{RequestId: id, Data: data, Error: problem, Reason: reason}
}

// writeGuestResult calls the guest agent and sends the result. While it waits, it sends empty messages.
func (l *Link) writeGuestResult(ctx context.Context, r *agentv1.GuestRequest, stream sendStream) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var result *agentv1.GuestResult
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		result, err = l.o.Guest(ctx, r)
	}()
	still := time.NewTicker(guestSilence)
	defer still.Stop()
	for waiting := true; waiting; {
		select {
		case <-done:
			waiting = false
		case <-still.C:
			if sendErr := stream.sendData(nil); sendErr != nil {
				cancel()
				<-done
				return sendErr
			}
		}
	}
	if err != nil {
		return err
	}
	data, err := proto.Marshal(result)
	if err != nil {
		return err
	}
	var w io.Writer = &pieces{stream, guestChunk, func(int) error { return ctx.Err() }}
	_, err = w.Write(data)
	return err
}

package uplink

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/console"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

// nullStream is a sendStream that discards all messages.
type nullStream struct{}

func (nullStream) sendID(string) error              { return nil }
func (nullStream) sendData([]byte) error            { return nil }
func (nullStream) sendProblem(string, string) error { return nil }
func (nullStream) closeAndRecv() error              { return nil }

// problemStream is a sendStream that keeps the error that is sent.
type problemStream struct {
	nullStream
	problems chan [2]string
}

func (s problemStream) sendProblem(text, reason string) error {
	s.problems <- [2]string{text, reason}
	return nil
}

// TestTransferIsRefused checks that the member gets the reason AGENT_BUSY for a request that exceeds the limit, and the
// reason of a refusal.
func TestTransferIsRefused(t *testing.T) {
	all := newTransfers("guest agent calls", 1, slog.New(slog.DiscardHandler))
	all.setSession(t.Context(), agentv1.NewAgentServiceClient(nil))
	t.Cleanup(all.cancelAll)
	stream := problemStream{problems: make(chan [2]string, 1)}
	begin := func(id string, write func(context.Context, sendStream) error) {
		open := func(context.Context, agentv1.AgentServiceClient) (sendStream, error) { return stream, nil }
		all.begin(transfer{id: id, open: open, write: write})
	}
	finish := make(chan struct{})
	begin("first", func(context.Context, sendStream) error {
		<-finish
		return &console.Refusal{Text: "not yet", Reason: "AGENT_STARTING"}
	})
	begin("second", func(context.Context, sendStream) error { panic("exceeds the limit") })
	require.Equal(t, [2]string{"this host has 1 guest agent calls in progress, which is the maximum: try again", agentBusy}, <-stream.problems)
	close(finish)
	require.Equal(t, [2]string{"not yet", "AGENT_STARTING"}, <-stream.problems)
}

// TestSessionEndsDuringHungTransfer ends a session while a transfer reads from a file system that does not respond, as
// a hard mount of NFS without its server. The next session must begin, and its transfers must run.
func TestSessionEndsDuringHungTransfer(t *testing.T) {
	all := newTransfers("snapshots", 2, slog.New(slog.DiscardHandler))
	client := agentv1.NewAgentServiceClient(nil)
	open := func(context.Context, agentv1.AgentServiceClient) (sendStream, error) { return nullStream{}, nil }
	begin := func(id string, write func(context.Context, sendStream) error) {
		all.begin(transfer{id: id, open: open, write: write})
	}
	started, respond, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	all.setSession(t.Context(), client)
	begin("hung", func(context.Context, sendStream) error {
		close(started)
		<-respond // ignores the context
		close(ended)
		return nil
	})
	<-started
	closed := make(chan struct{})
	go func() { defer close(closed); all.cancelAll() }()
	wait := func(c chan struct{}, what string) {
		t.Helper()
		select {
		case <-c:
		case <-time.After(time.Minute):
			t.Fatal(what)
		}
	}
	t.Cleanup(func() { close(respond); wait(ended, "the hung transfer has not ended") })
	wait(closed, "the session has not ended")
	all.setSession(t.Context(), client)
	next := make(chan struct{})
	begin("next", func(context.Context, sendStream) error { close(next); return nil })
	wait(next, "the next transfer has not begun")
	all.cancelAll()
	require.Eventually(t, func() bool { all.mu.Lock(); defer all.mu.Unlock(); return len(all.open) == 1 }, time.Minute, time.Millisecond)
}

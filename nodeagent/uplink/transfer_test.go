package uplink

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

// nullStream is a sendStream that discards all messages.
type nullStream struct{}

func (nullStream) sendID(string) error      { return nil }
func (nullStream) sendData([]byte) error    { return nil }
func (nullStream) sendProblem(string) error { return nil }
func (nullStream) closeAndRecv() error      { return nil }

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

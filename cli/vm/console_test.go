package vm

import (
	"bytes"
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	consolev1 "github.com/trivet-cloud/trivet/protos/console/v1"
)

// TestConsoleRetry checks when the console is opened again. A guest that has printed nothing for an hour must not
// prevent that, nor an attempt that fails while the agent restarts.
func TestConsoleRetry(t *testing.T) {
	lost := status.Error(codes.Unavailable, "the connection broke")
	s, err := status.New(codes.FailedPrecondition, "in use").WithDetails(&errdetails.ErrorInfo{Reason: "CONSOLE_IN_USE"})
	require.NoError(t, err)
	inUse := s.Err()
	now := time.UnixMilli(1_800_000_000_000)
	c := &serialConsole{now: func() time.Time { return now }}
	require.False(t, c.retry(lost), "the console was never open")
	require.False(t, c.retry(inUse))

	c.opened = true
	now = now.Add(time.Hour) // without output
	require.True(t, c.retry(lost))
	require.True(t, c.retry(inUse), "the member may still have the broken session")
	now = now.Add(consolePatience)
	require.True(t, c.retry(lost))
	require.False(t, c.retry(status.Error(codes.NotFound, "deleted")))
	now = now.Add(time.Millisecond)
	require.False(t, c.retry(lost))

	c.opened = true
	require.False(t, c.retry(inUse), "another session has become the writer while this one was open")
	c.opened = true
	now = now.Add(time.Hour)
	require.True(t, c.retry(lost))
}

// waitingConsole is a server whose consoles are never opened. It closes called when it gets a call.
type waitingConsole struct {
	consolev1.UnimplementedConsoleServiceServer
	called chan struct{}
}

func (w *waitingConsole) AttachConsole(stream consolev1.ConsoleService_AttachConsoleServer) error {
	close(w.called)
	<-stream.Context().Done()
	return stream.Context().Err()
}

// keys is standard input that has the given bytes after the channel ready is closed.
type keys struct {
	ready <-chan struct{}
	strings.Reader
}

func (k *keys) Read(p []byte) (int, error) {
	<-k.ready
	return k.Reader.Read(p)
}

// TestDetachBeforeOpen checks that the user of a terminal can detach while the server has not opened the console.
func TestDetachBeforeOpen(t *testing.T) {
	listener := bufconn.Listen(1 << 16)
	server, waiting := grpc.NewServer(), &waitingConsole{called: make(chan struct{})}
	consolev1.RegisterConsoleServiceServer(server, waiting)
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()
	conn, err := dial.Open(dial.Options{
		Endpoints: []string{"a"}, Plaintext: true,
		Dialer: func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) },
	})
	require.NoError(t, err)
	defer conn.Close()
	var errs bytes.Buffer
	c := &serialConsole{
		s:    &session.Session{Shell: session.Shell{Stdin: &keys{waiting.called, *strings.NewReader("root\x1d")}, Stderr: &errs}},
		conn: conn, name: "web", now: time.Now, raw: true, first: &consolev1.AttachConsoleRequest{},
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, c.run(ctx))
	require.Contains(t, errs.String(), "detached from web")
}

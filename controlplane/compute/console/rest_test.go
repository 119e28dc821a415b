package console

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// site starts the REST API of w, and returns its address.
func (w *world) site() string {
	s := rest.New(rest.Options{
		Service: fault.VM, Name: "vm", Verifier: w, Audit: w, Log: w.opts.Log, Metrics: rest.NewMetrics(prometheus.NewRegistry()),
		Ready: func(context.Context) error { return nil },
	})
	w.Routes(s)
	server := httptest.NewServer(s)
	w.t.Cleanup(server.Close)
	return server.URL
}

// dial opens the websocket of a ticket as a page of another origin does.
func (w *world) dial(site, ticket string) (*websocket.Conn, *http.Response, error) {
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute)
	w.t.Cleanup(cancel)
	conn, response, err := websocket.Dial(ctx, site+socketPath+"?ticket="+ticket, &websocket.DialOptions{
		Subprotocols: []string{"binary"}, HTTPHeader: http.Header{"Origin": {"https://novnc.example"}},
	})
	if conn != nil {
		w.t.Cleanup(func() { conn.CloseNow() })
	}
	return conn, response, err
}

// TestWebsocket sends data to a console and back, with a ticket that does not work a second time.
func TestWebsocket(t *testing.T) {
	w := newWorld(t)
	site := w.site()
	ticket := w.ticket("ada").Text
	conn, _, err := w.dial(site, ticket)
	require.NoError(t, err)
	require.Equal(t, "binary", conn.Subprotocol())
	long := strings.Repeat("x", 3*node.MaxConsoleInput+1)
	for _, text := range []string{"hello", long} {
		require.NoError(t, conn.Write(t.Context(), websocket.MessageBinary, []byte(text)))
		var got strings.Builder
		for got.Len() < len(text) {
			kind, data, err := conn.Read(t.Context())
			require.NoError(t, err)
			require.Equal(t, websocket.MessageBinary, kind)
			got.Write(data)
		}
		require.Equal(t, text, got.String())
	}
	_, response, err := w.dial(site, ticket)
	require.Error(t, err)
	require.Equal(t, http.StatusUnauthorized, response.StatusCode)
	require.NoError(t, conn.Close(websocket.StatusNormalClosure, ""))
	require.Len(t, w.opened, 1)
	require.Equal(t, []string{"ada AttachConsole vm/" + vmID + " OK"}, w.audited)
}

// TestWebsocketIsRefused checks the responses if no websocket is opened.
func TestWebsocketIsRefused(t *testing.T) {
	w := newWorld(t)
	site := w.site()
	response, err := http.Get(site + socketPath + "?ticket=x")
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusUnprocessableEntity, response.StatusCode, "a plain GET must not use up a ticket")

	w.serve = func(context.Context, node.ConsolePipe) error {
		return fault.New(fault.FailedPrecondition, "the VM is not running")
	}
	for token, want := range map[string]int{"ada": http.StatusUnprocessableEntity, "viewer": http.StatusForbidden} {
		_, response, err := w.dial(site, w.ticket(token).Text)
		require.Error(t, err)
		require.Equal(t, want, response.StatusCode, token)
	}
	ticket := w.ticket("eve").Text
	w.mu.Lock()
	w.revoked["eve"] = true
	w.mu.Unlock()
	_, response, err = w.dial(site, ticket)
	require.Error(t, err)
	require.Equal(t, http.StatusUnauthorized, response.StatusCode)
}

// TestWebsocketEnds checks the status of the close frame for each reason why an open console ends.
func TestWebsocketEnds(t *testing.T) {
	stop := make(chan error, 1)
	host := func(ctx context.Context, pipe node.ConsolePipe) error {
		if err := pipe.Send(node.ConsoleOutput{}); err != nil {
			return err
		}
		select {
		case err := <-stop:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for name, c := range map[string]struct {
		end  func(w *world, stop context.CancelFunc)
		want websocket.StatusCode
		text string
	}{
		"the VM stops":         {func(*world, context.CancelFunc) { stop <- nil }, websocket.StatusNormalClosure, ""},
		"the host is lost":     {func(*world, context.CancelFunc) { stop <- fault.New(fault.Unavailable, "broke") }, websocket.StatusTryAgainLater, "broke"},
		"it is taken over":     {func(*world, context.CancelFunc) { stop <- fault.New(fault.FailedPrecondition, "taken") }, websocket.StatusPolicyViolation, "taken"},
		"an unexpected error":  {func(*world, context.CancelFunc) { stop <- context.DeadlineExceeded }, websocket.StatusInternalError, "internal error"},
		"the member stops":     {func(_ *world, stop context.CancelFunc) { stop() }, websocket.StatusTryAgainLater, "stopping"},
		"the token is revoked": {func(w *world, _ context.CancelFunc) { w.mu.Lock(); w.revoked["ada"] = true; w.mu.Unlock() }, websocket.StatusPolicyViolation, "revoked"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.serve = host
			ctx, stopMember := context.WithCancel(t.Context())
			defer stopMember()
			go w.Run(ctx)
			conn, _, err := w.dial(w.site(), w.ticket("ada").Text)
			require.NoError(t, err)
			c.end(w, stopMember)
			_, _, err = conn.Read(t.Context())
			var closed websocket.CloseError
			require.ErrorAs(t, err, &closed)
			require.Equal(t, c.want, closed.Code)
			require.Contains(t, closed.Reason, c.text)
		})
	}
}

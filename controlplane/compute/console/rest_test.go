package console

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
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
	unused := w.ticket("ada").Text
	require.Equal(t, http.StatusUnprocessableEntity, upgrade(t, http.MethodHead, site, unused))
	require.Equal(t, 1, w.stored(), "a HEAD request must not use up a ticket")
	_, _, err = w.redeem(t.Context(), unused)
	require.NoError(t, err)

	w.serve = func(context.Context, node.ConsolePipe) error {
		return fault.New(fault.FailedPrecondition, "the VM is not running")
	}
	for token, want := range map[string]int{"ada": http.StatusUnprocessableEntity, "viewer": http.StatusForbidden} {
		_, response, err := w.dial(site, w.ticket(token).Text)
		require.Error(t, err)
		require.Equal(t, want, response.StatusCode, token)
		require.Equal(t, token+" AttachConsole vm/"+vmID+" "+map[string]string{"ada": "FAILED_PRECONDITION", "viewer": "PERMISSION_DENIED"}[token],
			w.audited[len(w.audited)-1])
	}
	require.Len(t, w.audited, 2)
	ticket := w.ticket("eve").Text
	w.mu.Lock()
	w.revoked["eve"] = true
	w.mu.Unlock()
	_, response, err = w.dial(site, ticket)
	require.Error(t, err)
	require.Equal(t, http.StatusUnauthorized, response.StatusCode)
}

// upgrade sends a request for a websocket, and returns the status of the response.
func upgrade(t *testing.T, method, site, ticket string) int {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, site+socketPath+"?ticket="+ticket, nil)
	require.NoError(t, err)
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", "websocket")
	response, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	return response.StatusCode
}

// TestTicketAttemptsAreBounded checks that a client that tries many tickets is refused before a ticket is looked up, also
// if the ticket is valid.
func TestTicketAttemptsAreBounded(t *testing.T) {
	w := newWorld(t)
	at := time.Now()
	w.attempts.Now = func() time.Time { return at }
	site, ticket := w.site(), w.ticket("ada").Text
	for range attemptLimits.Burst {
		require.Equal(t, http.StatusUnauthorized, upgrade(t, http.MethodGet, site, "x"))
	}
	require.Equal(t, http.StatusTooManyRequests, upgrade(t, http.MethodGet, site, ticket))
	require.Equal(t, 1, w.stored())
	w.attempts.Now = func() time.Time { return at.Add(attemptLimits.Every) }
	_, _, err := w.dial(site, ticket)
	require.NoError(t, err)
}

// TestWebsocketsCountAsStreams checks that an open websocket counts in the limits of open streams until it ends, and that
// one beyond the limit is refused, without using its ticket.
func TestWebsocketsCountAsStreams(t *testing.T) {
	w := newWorld(t)
	w.maxStreams = 1
	site := w.site()
	conn, _, err := w.dial(site, w.ticket("ada").Text)
	require.NoError(t, err)
	ticket := w.ticket("ada").Text
	_, response, err := w.dial(site, ticket)
	require.Error(t, err)
	require.Equal(t, http.StatusTooManyRequests, response.StatusCode)
	require.Len(t, w.opened, 1)
	require.NoError(t, conn.Close(websocket.StatusNormalClosure, ""))
	require.Eventually(t, func() bool { w.mu.Lock(); defer w.mu.Unlock(); return w.streams == 0 }, time.Minute, time.Millisecond)
	_, _, err = w.dial(site, ticket)
	require.NoError(t, err, "the refused websocket has used up its ticket")
}

// TestTicketOpensOneConsole opens five websockets with one ticket at the same time. All five look up the ticket before
// the first one redeems it. Only one websocket must be opened.
func TestTicketOpensOneConsole(t *testing.T) {
	const n = 5
	w := newWorld(t)
	site, ticket := w.site(), w.ticket("ada").Text
	var looked sync.WaitGroup
	looked.Add(n)
	open := w.opts.OpenStream
	w.opts.OpenStream = func(ctx context.Context, token string) (context.Context, func(), error) {
		looked.Done()
		looked.Wait()
		return open(ctx, token)
	}
	results := make(chan int, n)
	for range n {
		go func() {
			_, response, _ := w.dial(site, ticket)
			results <- response.StatusCode
		}()
	}
	counts := map[int]int{}
	for range n {
		counts[<-results]++
	}
	require.Equal(t, map[int]int{http.StatusSwitchingProtocols: 1, http.StatusUnauthorized: n - 1}, counts)
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

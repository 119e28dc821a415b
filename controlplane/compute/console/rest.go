package console

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/sync/errgroup"

	consolev1 "github.com/trivet-cloud/trivet/protos/console/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// socketPath is the path of the websocket.
const socketPath = "/api/v1/console"

const (
	// maxSocketMessage is the maximum size of a message from a websocket client, in bytes.
	maxSocketMessage = 1 << 20
	// pingEvery is the time between two pings of an open websocket, and writeTime the maximum time in which the client
	// must read a message or answer a ping.
	pingEvery = 20 * time.Second
	writeTime = 30 * time.Second
	// maxReason is the maximum length of the reason in a close frame, in bytes (RFC 6455, section 5.5).
	maxReason = 123
)

// Routes registers the REST API of consoles (docs/api.md).
func (s *Service) Routes(r *rest.Server) {
	protorest.Serve(r, &consolev1.ConsoleService_ServiceDesc, &server{s: s}, []protorest.Row{
		{Method: http.MethodPost, Path: "/api/v1/vms/{vm_id}/console", RPC: "CreateConsoleTicket", Creates: true},
		{Method: http.MethodGet, Path: "/api/v1/vms/{vm_id}/screenshot", RPC: "ReadScreenshot", Media: "image/png"},
	})
	r.HandleBare(http.MethodGet, socketPath, "opens a console for the holder of a ticket", s.getSocket,
		rest.Summary("Opens a console as a websocket with binary messages, for the holder of a ticket."),
		rest.QueryOf("ticket", nil, "The ticket that the creation of a console has returned."), rest.ReturnsSocket())
}

// getSocket uses the ticket in the query, and opens its console over a websocket with binary messages. Errors before the
// console is open are HTTP responses. Later ones are the reason of the close frame.
func (s *Service) getSocket(_ *rest.Response, r *http.Request) (any, error) {
	if r.Method != http.MethodGet || !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		return nil, fault.New(fault.FailedPrecondition, "GET %s needs a websocket client (header Upgrade: websocket)", socketPath)
	}
	if !s.attempts.Allow(network(r)) {
		return nil, fault.New(fault.ResourceExhausted, "too many attempts to use a console ticket from the network of %s: wait a few seconds and try again", rest.Remote(r)).
			WithReason("TOO_MANY_ATTEMPTS").MayRetry()
	}
	used, token, err := s.lookup(r.Context(), r.URL.Query().Get("ticket"))
	if err != nil {
		return nil, err
	}
	caller, err := s.opts.Verifier.Verify(r.Context(), token)
	if err != nil {
		return nil, err
	}
	caller.RequestID, caller.Address, caller.Target = rest.RequestID(r.Context()), rest.Remote(r), "vm/"+string(used.Session.VM)
	ctx := auth.With(auth.WithProjects(r.Context(), s.opts.Verifier), caller, auth.REST)
	return rest.Upgrade(func(w http.ResponseWriter) (bool, error) {
		began, err := s.serveSocket(ctx, w, r, used, token)
		if err != nil {
			auth.ReportFailure(s.opts.Audit, caller, service+"AttachConsole", rest.Outcome(err), caller.RequestID, caller.Address)
		}
		return began, err
	}), nil
}

// network returns the client network of a request, as rpc.Network does.
func network(r *http.Request) string {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	return rpc.NetworkOf(net.TCPAddrFromAddrPort(from)).String()
}

// serveSocket redeems the ticket, opens the console and then the websocket, and copies data until one side ends. If no
// websocket was opened, began is false and err is the reason. Otherwise err is nil. If the caller has too many open
// streams, or is not authorized, serveSocket does not redeem the ticket, so that the caller can use it again.
func (s *Service) serveSocket(ctx context.Context, w http.ResponseWriter, r *http.Request, used redeemed, token string) (began bool, err error) {
	ctx, end, err := s.sockets.begin(ctx)
	if err != nil {
		return false, err
	}
	defer end()
	ctx, leave, err := s.opts.OpenStream(ctx, token)
	if err != nil {
		return false, err
	}
	defer leave()
	if _, err := auth.Admit(ctx, service+"AttachConsole", string(used.Tenant.Org), string(used.Tenant.Project)); err != nil {
		return false, err
	}
	// This context has no caller: the audit record of AttachConsole is that of the session, not of the ticket's deletion.
	if _, _, err := s.redeem(r.Context(), r.URL.Query().Get("ticket")); err != nil {
		return false, err
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	c := &socket{input: make(chan []byte)}
	var reading sync.WaitGroup
	group, working := errgroup.WithContext(ctx)
	group.Go(func() error {
		err := s.Attach(working, used.Tenant, used.Session, node.ConsolePipe{Recv: c.recv, Send: func(out node.ConsoleOutput) error {
			if c.conn != nil {
				return c.send(working, out.Data)
			}
			if err := c.accept(w, r); err != nil {
				return err
			}
			reading.Go(func() {
				// Another error means that the console has ended already: it must not replace the reason.
				if err := c.read(working); errors.Is(err, io.EOF) {
					stop(err)
				}
			})
			group.Go(func() error { return c.ping(working) })
			return nil
		}})
		if err == nil {
			err = io.EOF // ends ping
		}
		return err
	})
	err = group.Wait()
	if cause := context.Cause(ctx); cause != nil {
		err = cause // the client has closed the socket, the token is no longer valid, or the member stops
	}
	if c.conn == nil {
		return false, err
	}
	c.close(err)
	reading.Wait()
	return true, nil
}

// socket is a websocket of a console.
type socket struct {
	conn  *websocket.Conn // nil until accept
	input chan []byte
}

func (c *socket) accept(w http.ResponseWriter, r *http.Request) error {
	conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{
		Subprotocols: []string{"binary"}, CompressionMode: websocket.CompressionDisabled,
		InsecureSkipVerify: true, // the origin is not checked, because the ticket is the only credential
	})
	if err != nil {
		return fault.New(fault.InvalidArgument, "open the websocket: %v", err)
	}
	conn.SetReadLimit(maxSocketMessage)
	c.conn = conn
	return nil
}

func (c *socket) send(ctx context.Context, data []byte) error {
	ctx, cancel := context.WithTimeout(ctx, writeTime)
	defer cancel()
	return c.conn.Write(ctx, websocket.MessageBinary, data)
}

// recv returns the next piece of a message of the client.
func (c *socket) recv(ctx context.Context) ([]byte, error) {
	select {
	case data := <-c.input:
		return data, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// read passes the messages of the client to the channel input. It returns io.EOF when the socket is closed. The end of
// ctx does not end a read, because that would close the connection without a close frame.
func (c *socket) read(ctx context.Context) error {
	for {
		_, data, err := c.conn.Read(context.WithoutCancel(ctx))
		if err != nil {
			return io.EOF
		}
		for len(data) > 0 {
			piece := data[:min(len(data), node.MaxConsoleInput)]
			data = data[len(piece):]
			select {
			case c.input <- piece:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
}

// ping sends pings, so that a client that is gone is noticed.
func (c *socket) ping(ctx context.Context) error {
	again := time.NewTicker(pingEvery)
	defer again.Stop()
	for {
		select {
		case <-again.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		bounded, cancel := context.WithTimeout(ctx, writeTime)
		err := c.conn.Ping(bounded)
		cancel()
		if err != nil {
			return err
		}
	}
}

// close sends the close frame with the reason why the console has ended. The status is 1000 if the VM has stopped or the
// client has closed the socket, 1008 if the user may not continue, 1011 for other faults, and 1013 if the client may
// open the console again.
func (c *socket) close(err error) {
	status, text := websocket.StatusNormalClosure, ""
	if !errors.Is(err, io.EOF) {
		status, text = websocket.StatusInternalError, "internal error"
		if f, ok := fault.From(err); ok {
			text = f.Message
			switch f.Kind {
			case fault.Unauthenticated, fault.PermissionDenied, fault.FailedPrecondition, fault.ResourceExhausted, fault.DeadlineExceeded:
				status = websocket.StatusPolicyViolation
			case fault.Unavailable:
				status = websocket.StatusTryAgainLater
			}
		}
	}
	if len(text) > maxReason {
		text = strings.ToValidUTF8(text[:maxReason], "")
	}
	_ = c.conn.Close(status, text) // the client may be gone
}

package console

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const vmID = "018f0000-0000-7000-8000-000000000001"

var web = cloud.Tenant{Org: "acme", Project: "web"}

// world is a Service with one VM of project web, a fake host, and users whose tokens are their names.
type world struct {
	*Service
	t   *testing.T
	now time.Time

	mu      sync.Mutex
	opened  []node.ConsoleRequest
	revoked map[string]bool
	audited []string
	// serve is the fake host.
	serve func(ctx context.Context, pipe node.ConsolePipe) error
	moved bool // the VM is on another host
	// streams is the number of open streams, and maxStreams the limit.
	streams, maxStreams int
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, now: time.UnixMilli(1_800_000_000_000), revoked: map[string]bool{}, serve: echo, maxStreams: 10}
	checks := auth.NewRechecker(w)
	w.Service = New(Options{
		Store: storetest.Memory(t, func() time.Time { return w.now }), Commands: leadertest.Single(), VMs: w, Hosts: w, Verifier: w, Audit: w,
		OpenStream: func(ctx context.Context, token string) (context.Context, func(), error) {
			return w.openStream(ctx, checks, token)
		},
		Log: slog.New(slog.DiscardHandler),
	})
	return w
}

func (w *world) Get(_ context.Context, t cloud.Tenant, id cloud.VMID) (*cloud.VM, error) {
	if t != web || id != vmID {
		return nil, fault.New(fault.NotFound, "no VM %s", id)
	}
	vm := &cloud.VM{ID: id, Org: t.Org, Project: t.Project, Node: "host"}
	if w.moved {
		vm.Node = "target"
	}
	return vm, nil
}

func (w *world) OpenConsole(ctx context.Context, q node.ConsoleRequest, pipe node.ConsolePipe) error {
	w.mu.Lock()
	w.opened = append(w.opened, q)
	w.mu.Unlock()
	return w.serve(ctx, pipe)
}

// echo is a host that sends back what the user sends.
func echo(ctx context.Context, pipe node.ConsolePipe) error {
	if err := pipe.Send(node.ConsoleOutput{}); err != nil {
		return err
	}
	for {
		data, err := pipe.Recv(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := pipe.Send(node.ConsoleOutput{Data: data}); err != nil {
			return err
		}
	}
}

// Verify implements auth.Verifier. Every user has the role project:member in project web, except viewers.
func (w *world) Verify(_ context.Context, token string) (*cloud.Caller, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.revoked[token] {
		return nil, fault.New(fault.Unauthenticated, "the token is revoked")
	}
	role := cloud.ProjectMember
	if token == "viewer" {
		role = cloud.ProjectViewer
	}
	return &cloud.Caller{
		User: cloud.UserID(token), Proof: cloud.ProofPassword, Bindings: []cloud.Binding{{Role: role, Org: web.Org, Project: web.Project}},
	}, nil
}

func (w *world) Failed(c *cloud.Caller, outcome, _ string) { w.audit(c, outcome) }
func (w *world) Done(c *cloud.Caller)                      { w.audit(c, "OK") }

func (w *world) audit(c *cloud.Caller, outcome string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.audited = append(w.audited, strings.Join([]string{string(c.User), c.Method[strings.LastIndex(c.Method, "/")+1:], c.Target, outcome}, " "))
}

// openStream implements Options.OpenStream.
func (w *world) openStream(ctx context.Context, checks *auth.Rechecker, token string) (context.Context, func(), error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.streams == w.maxStreams {
		return nil, nil, fault.New(fault.ResourceExhausted, "too many streams")
	}
	w.streams++
	ctx, end := context.WithCancelCause(ctx)
	stop := checks.WhileValid(ctx, token, end)
	return ctx, func() {
		stop()
		end(nil)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.streams--
	}, nil
}

func (w *world) ticket(token string) Ticket {
	w.t.Helper()
	ticket, err := w.CreateTicket(w.t.Context(), web, Session{VM: vmID, Kind: agentv1.ConsoleKind_CONSOLE_KIND_VNC}, token)
	require.NoError(w.t, err)
	return ticket
}

func (w *world) refused(text string) {
	w.t.Helper()
	_, _, err := w.redeem(w.t.Context(), text)
	require.True(w.t, fault.Is(err, fault.Unauthenticated), "%v", err)
}

func (w *world) stored() (n int) {
	require.NoError(w.t, w.opts.Store.View(w.t.Context(), func(v *store.View) error {
		all, _, err := tickets.List(v, 0)
		n = len(all)
		return err
	}))
	return n
}

// TestTicketWorksOnce checks that a ticket is valid for one use and one minute, and that its record has neither the
// secret nor the token in plain text.
func TestTicketWorksOnce(t *testing.T) {
	w := newWorld(t)
	ticket := w.ticket("ada")
	require.Equal(t, w.now.Add(time.Minute).UnixMilli(), ticket.Expires)
	require.NoError(t, w.opts.Store.View(t.Context(), func(v *store.View) error {
		all, _, err := tickets.List(v, 0)
		require.Len(t, all, 1)
		record := fmt.Sprintf("%+v %s", all[0].Value, all[0].Value.Token)
		require.NotContains(t, record, "ada")
		require.NotContains(t, record, ticket.Text[strings.LastIndex(ticket.Text, ".")+1:])
		return err
	}))
	parts := strings.Split(ticket.Text, ".")
	for _, bad := range []string{"", "x", "..", parts[0] + "." + parts[1] + ".x", parts[0] + ".x." + parts[2], "eA." + parts[1] + "." + parts[2], "YS9i." + parts[1] + "." + parts[2], parts[0] + ".a/b.x", strings.Repeat("x", 1000)} {
		w.refused(bad)
	}
	used, token, err := w.redeem(t.Context(), ticket.Text)
	require.NoError(t, err)
	require.Equal(t, "ada", token)
	require.Equal(t, redeemed{web, Session{VM: vmID, Kind: agentv1.ConsoleKind_CONSOLE_KIND_VNC}, used.Token}, used)
	w.refused(ticket.Text)
	require.Zero(t, w.stored())

	ticket = w.ticket("ada")
	w.now = w.now.Add(TicketLife - time.Millisecond)
	_, _, err = w.redeem(t.Context(), ticket.Text)
	require.NoError(t, err)
	ticket = w.ticket("ada")
	w.now = w.now.Add(TicketLife)
	w.refused(ticket.Text)
	require.Equal(t, 1, w.stored())
	require.NoError(t, w.Expire(t.Context()))
	require.Zero(t, w.stored())
}

// TestTicketsAreBounded checks the limit of a project's unused tickets, and that expired ones do not count.
func TestTicketsAreBounded(t *testing.T) {
	w := newWorld(t)
	for range maxTickets {
		w.ticket("ada")
	}
	q := Session{VM: vmID, Kind: agentv1.ConsoleKind_CONSOLE_KIND_SERIAL}
	_, err := w.CreateTicket(t.Context(), web, q, "ada")
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	w.now = w.now.Add(TicketLife)
	_, err = w.CreateTicket(t.Context(), web, q, "ada")
	require.NoError(t, err)
	require.Equal(t, 1, w.stored())
}

// TestInvalidSessions checks that invalid fields are refused before a host is asked.
func TestInvalidSessions(t *testing.T) {
	const serial, vnc = agentv1.ConsoleKind_CONSOLE_KIND_SERIAL, agentv1.ConsoleKind_CONSOLE_KIND_VNC
	for name, c := range map[string]struct {
		q    Session
		want fault.Kind
	}{
		"no VM":                {Session{Kind: serial}, fault.InvalidArgument},
		"not a UUID":           {Session{VM: "web", Kind: serial}, fault.InvalidArgument},
		"another VM":           {Session{VM: "018f0000-0000-7000-8000-000000000002", Kind: serial}, fault.NotFound},
		"too much output":      {Session{VM: vmID, Kind: serial, TailBytes: maxTail + 1}, fault.InvalidArgument},
		"a negative offset":    {Session{VM: vmID, Kind: serial, FromOffset: new(int64(-1))}, fault.InvalidArgument},
		"two modes":            {Session{VM: vmID, Kind: serial, ReadOnly: true, TakeOver: true}, fault.InvalidArgument},
		"a read-only display":  {Session{VM: vmID, Kind: vnc, ReadOnly: true}, fault.InvalidArgument},
		"output of a display":  {Session{VM: vmID, Kind: vnc, TailBytes: 1}, fault.InvalidArgument},
		"a display taken over": {Session{VM: vmID, Kind: vnc, TakeOver: true}, fault.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			err := w.Attach(auth.With(t.Context(), &cloud.Caller{}, auth.RPC), web, c.q, node.ConsolePipe{})
			require.True(t, fault.Is(err, c.want), "%v", err)
			require.Empty(t, w.opened)
			require.Empty(t, w.audited)
		})
	}
}

// TestMovedVM checks that a session whose VM was migrated ends with UNAVAILABLE, and that the next one does not use the
// offset of the log on the host before.
func TestMovedVM(t *testing.T) {
	w := newWorld(t)
	offset := int64(7)
	q := Session{VM: vmID, Kind: agentv1.ConsoleKind_CONSOLE_KIND_SERIAL, FromOffset: &offset, FromLog: "host"}
	var log string
	pipe := node.ConsolePipe{
		Recv: func(ctx context.Context) ([]byte, error) { <-ctx.Done(); return nil, ctx.Err() },
		Send: func(out node.ConsoleOutput) error { log = out.Log; return nil },
	}
	moves := false
	w.serve = func(_ context.Context, pipe node.ConsolePipe) error { // QEMU ends after a byte
		w.moved = moves
		return pipe.Send(node.ConsoleOutput{Data: []byte("x")})
	}
	ctx := auth.With(t.Context(), &cloud.Caller{}, auth.RPC)
	require.NoError(t, w.Attach(ctx, web, q, pipe), "the VM has stopped")
	moves = true
	require.True(t, fault.Is(w.Attach(ctx, web, q, pipe), fault.Unavailable))
	require.Equal(t, "host", log)
	require.NoError(t, w.Attach(ctx, web, q, pipe))
	require.Equal(t, "target", log)
	require.Equal(t, &offset, w.opened[1].FromOffset)
	require.Nil(t, w.opened[2].FromOffset)
}

// TestRecordOfSession checks that a session is in the audit exactly once: when it was opened, and not when it ends. For a
// session that could not be opened, the caller of Attach reports the error.
func TestRecordOfSession(t *testing.T) {
	pipe := node.ConsolePipe{
		Recv: func(ctx context.Context) ([]byte, error) { <-ctx.Done(); return nil, ctx.Err() },
		Send: func(node.ConsoleOutput) error { return nil },
	}
	for name, opens := range map[string]bool{"the host is lost": true, "the host cannot open it": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.serve = func(_ context.Context, pipe node.ConsolePipe) error {
				if opens {
					require.NoError(t, pipe.Send(node.ConsoleOutput{}))
					require.NoError(t, pipe.Send(node.ConsoleOutput{Data: []byte("x")}))
				}
				return fault.New(fault.Unavailable, "broke")
			}
			c := &cloud.Caller{User: "ada", Method: service + "AttachConsole"}
			err := w.Attach(auth.With(t.Context(), c, auth.RPC), web, Session{VM: vmID, Kind: agentv1.ConsoleKind_CONSOLE_KIND_SERIAL}, pipe)
			require.True(t, fault.Is(err, fault.Unavailable))
			require.Equal(t, opens, c.Recorded)
			require.Len(t, w.audited, map[bool]int{true: 1}[opens])
		})
	}
}

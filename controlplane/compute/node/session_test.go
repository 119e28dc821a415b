package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

type watching struct {
	t *testing.T
	agentv1.AgentService_WatchClient
}

func (a agent) watch(t *testing.T, present ...cloud.VMID) watching {
	ask := &agentv1.WatchRequest{Protocol: Protocol}
	for _, id := range present {
		ask.PresentVms = append(ask.PresentVms, string(id))
	}
	s, err := a.AgentServiceClient.Watch(limited(t), ask)
	require.NoError(t, err)
	return watching{t, s}
}

func (s watching) next() *agentv1.WatchResponse {
	s.t.Helper()
	m, err := s.Recv()
	require.NoError(s.t, err)
	return m
}

// all receives a snapshot to its last message. It returns the power state of each VM, and that message.
func (s watching) all() (vms map[cloud.VMID]agentv1.Power, last *agentv1.WatchResponse) {
	s.t.Helper()
	vms = map[cloud.VMID]agentv1.Power{}
	for first := true; ; first = false {
		last = s.next()
		require.Equal(s.t, first, last.GetLeaseSeconds() == LeaseSeconds, "only the first message must contain the lease")
		require.LessOrEqual(s.t, len(last.GetVms()), snapshotChunk)
		for _, vm := range last.GetVms() {
			require.NotContains(s.t, vms, cloud.VMID(vm.GetVmId()), "the snapshot contains a VM twice")
			vms[cloud.VMID(vm.GetVmId())] = vm.GetPower()
		}
		if last.GetComplete() {
			return vms, last
		}
	}
}

// TestWatch checks what a session sends: a snapshot in chunks, with a desired state for each VM placed on the host or
// present there, and then the changes of this host's VMs only.
func TestWatch(t *testing.T) {
	w := newWorld(t)
	a, b := w.host(1, 1), w.host(1, 2)
	want := map[cloud.VMID]agentv1.Power{}
	w.update(func(tx *store.Tx) error {
		for n := range 250 {
			PlacedVMs.Put(tx, &Placed{Generation: 1, Gone: n == 7}, string(a.id), string(testVM(n)))
			want[testVM(n)] = agentv1.Power_POWER_ON
		}
		PlacedVMs.Put(tx, &Placed{Generation: 1}, string(b.id), string(testVM(300)))
		return nil
	})
	want[testVM(7)] = agentv1.Power_POWER_DESTROYED
	want[testVM(400)] = agentv1.Power_POWER_ORPHANED
	want[testVM(300)] = agentv1.Power_POWER_ORPHANED // placed on another host
	s := a.watch(t, testVM(1), testVM(7), testVM(400), testVM(300), testVM(400))
	got, last := s.all()
	require.Equal(t, want, got)
	require.EqualValues(t, 1, last.GetTerm())
	require.Equal(t, w.records.Revision(), last.GetRevision())

	w.place(b.id, testVM(301), &Placed{Generation: 1})
	w.place(a.id, testVM(1), &Placed{Generation: 2})
	m := s.next()
	require.True(t, m.GetComplete())
	require.Len(t, m.GetVms(), 1)
	require.Equal(t, string(testVM(1)), m.GetVms()[0].GetVmId())
	require.EqualValues(t, 2, m.GetVms()[0].GetGeneration())
	require.Equal(t, w.records.Revision(), m.GetRevision())
	require.EqualValues(t, 1, m.GetTerm())

	w.place(a.id, testVM(2), &Placed{Generation: 2, Gone: true})
	m = s.next()
	require.Equal(t, agentv1.Power_POWER_DESTROYED, m.GetVms()[0].GetPower())
	require.Empty(t, m.GetReleasedVms())
	w.place(a.id, testVM(2), nil)
	m = s.next()
	require.Empty(t, m.GetVms())
	require.Equal(t, []string{string(testVM(2))}, m.GetReleasedVms())

	// If a placement has no VM record, the VM must not be sent as destroyed.
	w.place(a.id, testVM(3), &Placed{Project: "no record", Generation: 9})
	m = s.next()
	require.Empty(t, m.GetVms())
	require.Empty(t, m.GetReleasedVms())

	empty, last := b.watch(t).all()
	require.Len(t, empty, 2)
	require.True(t, last.GetComplete())
	empty, _ = w.host(1, 3).watch(t).all()
	require.Empty(t, empty, "an empty snapshot must have no VMs")
}

// TestWatchRefused checks which Watch calls are refused, and that a follower's error names the leader's address.
func TestWatchRefused(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		name   string
		member uint64
		ask    *agentv1.WatchRequest
		code   codes.Code
		says   string
	}{
		{"another protocol", 1, &agentv1.WatchRequest{Protocol: 2}, codes.FailedPrecondition, "upgrade the older"},
		{"a VM ID that is not a UUID", 1, &agentv1.WatchRequest{Protocol: 1, PresentVms: []string{"../x"}}, codes.InvalidArgument, "present_vms"},
		{"too many present VMs", 1, &agentv1.WatchRequest{Protocol: 1, PresentVms: slices.Repeat([]string{string(testVM(1))}, maxPresent+1)}, codes.InvalidArgument, "20000"},
		{"a follower", 2, &agentv1.WatchRequest{Protocol: 1}, codes.FailedPrecondition, "member 1 leads"},
	} {
		s, err := w.host(c.member, 1).AgentServiceClient.Watch(limited(t), c.ask)
		require.NoError(t, err)
		_, err = s.Recv()
		require.Error(t, err, c.name)
		refused(t, err, c.code, c.says)
		if c.member == 2 {
			f := rpc.FaultOf(err)
			require.Equal(t, "NOT_LEADER", f.Reason)
			require.Equal(t, w.addresses[1], f.Details["leader"])
		}
	}
	require.Empty(t, w.members[1].sessions)
}

// TestSessionsEnd checks that a session ends when the same host opens a newer one, when the leadership ends (with the
// address of the next leader, if any), and when the host's certificate expires.
func TestSessionsEnd(t *testing.T) {
	w := newWorld(t)
	a := w.host(1, 1)
	s := a.watch(t)
	s.all()
	again := a.watch(t)
	again.all()
	_, err := s.Recv()
	refused(t, err, codes.Aborted, "another session")
	other := w.host(1, 2).watch(t)
	other.all()
	w.place(a.id, testVM(1), &Placed{Generation: 1})
	require.Len(t, again.next().GetVms(), 1, "the newer session must stay open")

	w.leadership.Elect(2)
	for _, s := range []watching{again, other} {
		_, err = s.Recv()
		refused(t, err, codes.FailedPrecondition, "member 2 leads")
		require.Equal(t, w.addresses[2], rpc.FaultOf(err).Details["leader"])
	}
	s = w.host(2, 1).watch(t, testVM(5))
	vms, first := s.all()
	require.Equal(t, map[cloud.VMID]agentv1.Power{testVM(1): agentv1.Power_POWER_ON, testVM(5): agentv1.Power_POWER_ORPHANED}, vms)
	require.EqualValues(t, 2, first.GetTerm())
	w.leadership.Elect(2)
	_, err = s.Recv()
	refused(t, err, codes.Unavailable, "leader again in a new term")
	w.leadership.Elect(0)
	_, err = w.host(2, 1).watch(t).Recv()
	refused(t, err, codes.Unavailable, "no leader")
	for id, m := range w.members {
		require.Eventually(t, func() bool { m.mu.Lock(); defer m.mu.Unlock(); return len(m.sessions) == 0 }, 10*time.Second, time.Millisecond, id)
	}

	w.leadership.Elect(1)
	// On a busy machine a short certificate may expire before the session has begun. The next one is valid for longer.
	for life, begun := time.Second, false; !begun; life *= 2 {
		require.Less(t, life, time.Minute, "no session began while its certificate was valid")
		short, err := w.with(1, w.certificate(mtls.Node, string(a.id), time.Now(), life)).
			AgentServiceClient.Watch(limited(t), &agentv1.WatchRequest{Protocol: Protocol})
		require.NoError(t, err)
		for err == nil {
			var m *agentv1.WatchResponse
			m, err = short.Recv()
			begun = begun || m.GetComplete()
		}
		refused(t, err, codes.Unauthenticated, "expired")
	}
}

// reading is a ReadConsole call through a member: the received pieces, the final error, and a function that cancels it.
type reading struct {
	pieces chan string
	end    chan error
	cancel context.CancelFunc
}

func (w *world) read(member uint64, on cloud.NodeID, follow bool) *reading {
	ctx, cancel := context.WithCancel(limited(w.t))
	r := &reading{make(chan string, 100), make(chan error, 1), cancel}
	go func() {
		r.end <- w.members[member].ReadConsole(ctx, cloud.Tenant{Org: "acme", Project: "web"}, on, testVM(1), follow, 4096, func(b []byte) error { r.pieces <- string(b); return nil })
	}()
	return r
}

// TestConsole reads consoles through a follower. The leader must send the request to the agent over its session, and
// the reader must get the bytes that the agent sends back. The test ends reads in every possible way: the log is
// complete, the agent sends an error or too large a message, the connection breaks, and the reader cancels.
func TestConsole(t *testing.T) {
	w := newWorld(t)
	a, b := w.host(1, 1), w.host(1, 2)
	require.ErrorContains(t, <-w.read(2, a.id, false).end, "not connected")
	s := a.watch(t)
	s.all()
	b.watch(t).all()
	nextRequest := func() *agentv1.ConsoleRequest {
		m := s.next()
		require.True(t, m.GetComplete())
		require.Empty(t, m.GetVms())
		require.Len(t, m.GetConsoleRequests(), 1)
		return m.GetConsoleRequests()[0]
	}
	answer := func(a agent, id string) agentv1.AgentService_SendConsoleClient {
		out, err := a.SendConsole(limited(t))
		require.NoError(t, err)
		require.NoError(t, out.Send(&agentv1.SendConsoleRequest{RequestId: id}))
		return out
	}
	canceled := func(id string) {
		r := nextRequest()
		require.True(t, r.GetCancel())
		require.Equal(t, id, r.GetRequestId())
	}

	// First read: the agent sends all of the log.
	r := w.read(2, a.id, false)
	ask := nextRequest()
	require.Equal(t, string(testVM(1)), ask.GetVmId())
	require.EqualValues(t, 4096, ask.GetTailBytes())
	require.False(t, ask.GetFollow())
	_, err := answer(b, ask.GetRequestId()).CloseAndRecv()
	refused(t, err, codes.NotFound, "no reader waits") // another host must not be able to send this host's console
	out := answer(a, ask.GetRequestId())
	require.NoError(t, out.Send(&agentv1.SendConsoleRequest{Data: []byte("hello")}))
	require.Equal(t, "hello", <-r.pieces)
	_, err = answer(a, ask.GetRequestId()).CloseAndRecv()
	refused(t, err, codes.AlreadyExists, "another stream already answers")
	_, err = out.CloseAndRecv()
	require.NoError(t, err)
	require.NoError(t, <-r.end)
	canceled(ask.GetRequestId())
	_, err = answer(a, ask.GetRequestId()).CloseAndRecv()
	refused(t, err, codes.NotFound, "no reader waits")

	// Further reads: the agent returns an error, breaks the stream, or sends too large a message; or the reader
	// cancels.
	for name, c := range map[string]struct {
		how  func(agentv1.AgentService_SendConsoleClient, context.CancelFunc, *reading)
		kind fault.Kind
		says string
	}{
		"the agent returns an error": {func(out agentv1.AgentService_SendConsoleClient, _ context.CancelFunc, _ *reading) {
			out.Send(&agentv1.SendConsoleRequest{Error: "this VM has no console log"})
		}, fault.FailedPrecondition, "no console log"},
		"the agent's stream breaks": {func(_ agentv1.AgentService_SendConsoleClient, cut context.CancelFunc, _ *reading) { cut() }, fault.Unavailable, "broke"},
		"a too large message": {func(out agentv1.AgentService_SendConsoleClient, _ context.CancelFunc, _ *reading) {
			out.Send(&agentv1.SendConsoleRequest{Data: make([]byte, maxChunk+1)})
		}, fault.Unavailable, "which is too large"},
		"the reader cancels": {func(_ agentv1.AgentService_SendConsoleClient, _ context.CancelFunc, r *reading) { r.cancel() }, fault.Internal, "canceled"},
	} {
		r := w.read(2, a.id, true)
		ask := nextRequest()
		require.True(t, ask.GetFollow())
		ctx, cut := context.WithCancel(limited(t))
		out, err := a.SendConsole(ctx)
		require.NoError(t, err)
		require.NoError(t, out.Send(&agentv1.SendConsoleRequest{RequestId: ask.GetRequestId(), Data: []byte("begin")}))
		require.Equal(t, "begin", <-r.pieces)
		c.how(out, cut, r)
		err = <-r.end
		require.ErrorContains(t, err, c.says, name)
		if f, ok := fault.From(err); ok {
			require.Equal(t, c.kind, f.Kind, name)
		} else {
			require.Equal(t, "the reader cancels", name)
		}
		canceled(ask.GetRequestId())
		_, err = out.CloseAndRecv()
		if name != "the agent's stream breaks" {
			require.NoError(t, err, "the agent's stream must end without an error: %s", name)
		}
		cut()
	}
	require.Empty(t, w.members[1].consoles.open)
}

// TestConsoleLimits checks that readers beyond maxConsoles are refused, and that ended readers leave no request in the
// queue of an agent that reads none.
func TestConsoleLimits(t *testing.T) {
	w := newWorld(t)
	s := w.members[1]
	a := s.openSession("host", func(error) {})
	ctx, cancel := context.WithCancel(limited(t))
	ends := make(chan error, maxConsoles)
	reader := func(i int) consoleRequest {
		org := fmt.Sprint("org-", i/maxOrgConsoles)
		return consoleRequest{Tenant: cloud.Tenant{Org: cloud.OrgID(org), Project: cloud.ProjectID(fmt.Sprint(org, "-", i%2))}, Node: "host", VM: testVM(1)}
	}
	for i := range maxConsoles {
		go func() { ends <- s.readConsoleOnLeader(ctx, reader(i), func([]byte) error { return nil }) }()
	}
	waiting := func() int { a.mu.Lock(); defer a.mu.Unlock(); return len(a.requests) }
	require.Eventually(t, func() bool { return waiting() == maxConsoles }, 10*time.Second, time.Millisecond)
	for range 10 {
		err := s.readConsoleOnLeader(ctx, reader(maxConsoles), nil)
		require.True(t, fault.Is(err, fault.Unavailable))
		require.ErrorContains(t, err, "64 reads of console logs")
	}
	require.Equal(t, maxConsoles, waiting())
	_, err := s.consoles.add("x", "another host", cloud.Tenant{}, "")
	require.NoError(t, err)
	s.consoles.remove("x")
	cancel()
	for range maxConsoles {
		require.ErrorIs(t, <-ends, context.Canceled)
	}
	require.Zero(t, waiting(), "the queue has a request or a cancellation after its reader has ended")

	a.enqueue(&agentv1.ConsoleRequest{RequestId: "seen"})
	require.True(t, a.takeRequests(&agentv1.WatchResponse{}))
	a.cancelRequest(&agentv1.ConsoleRequest{RequestId: "seen", Cancel: true})
	var message agentv1.WatchResponse
	require.True(t, a.takeRequests(&message))
	require.True(t, message.GetConsoleRequests()[0].GetCancel())
}

// TestTenantConsoleLimits checks that the consoles that one project and one org read on a host are limited, and that
// another org can still read its consoles.
func TestTenantConsoleLimits(t *testing.T) {
	w := newWorld(t)
	s := w.members[1]
	s.openSession("host", func(error) {})
	ctx, cancel := context.WithCancel(limited(t))
	ends := make(chan error, maxConsoles)
	reading := 0
	read := func(org cloud.OrgID, project cloud.ProjectID) error {
		q := consoleRequest{Tenant: cloud.Tenant{Org: org, Project: project}, Node: "host", VM: testVM(1), Follow: true}
		ended := make(chan error, 1)
		go func() { ended <- s.readConsoleOnLeader(ctx, q, func([]byte) error { return nil }) }()
		var err error
		require.Eventually(t, func() bool {
			s.consoles.mu.Lock()
			defer s.consoles.mu.Unlock()
			select {
			case err = <-ended:
				return true
			default:
				return len(s.consoles.open) == reading+1
			}
		}, 10*time.Second, time.Millisecond)
		if err == nil {
			reading++
			go func() { ends <- <-ended }()
		}
		return err
	}
	refused := func(err error, text string) {
		t.Helper()
		require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
		require.ErrorContains(t, err, text)
	}
	for range maxProjectConsoles {
		require.NoError(t, read("evil", "one"))
	}
	refused(read("evil", "one"), "project evil/one has 4 reads of console logs")
	for range maxOrgConsoles - maxProjectConsoles {
		require.NoError(t, read("evil", "two"))
	}
	refused(read("evil", "three"), "org evil has 8 reads of console logs")
	require.NoError(t, read("acme", "web"), "another org must be able to read its consoles")
	cancel()
	for range reading {
		require.ErrorIs(t, <-ends, context.Canceled)
	}
	require.Empty(t, s.consoles.open)
}

// TestConsolePieces checks which chunk the reader gets for each message, and for each way in which an agent's stream
// ends.
func TestConsolePieces(t *testing.T) {
	long := make([]byte, 2*maxError)
	for i := range long {
		long[i] = 'x'
	}
	for _, c := range []struct {
		said *agentv1.SendConsoleRequest
		err  error
		data string
		says string
	}{
		{&agentv1.SendConsoleRequest{Data: []byte("data")}, nil, "data", "<nil>"},
		{&agentv1.SendConsoleRequest{Error: "no \xff log"}, nil, "", "no  log"},
		{&agentv1.SendConsoleRequest{Error: string(long)}, nil, "", string(long[:maxError])},
		{nil, io.EOF, "", "EOF"},
		{nil, errors.New("reset"), "", "the connection to the host of the VM broke"},
	} {
		p := newConsoleReads().chunk(c.said, c.err)
		require.Equal(t, c.data, string(p.data))
		require.Equal(t, c.says, fmt.Sprint(p.err))
	}
}

package dial

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// fleet is a set of members in memory: gRPC servers whose responses the test sets. It lists the calls that they
// receive.
type fleet struct {
	t  *testing.T
	mu sync.Mutex
	// listeners holds the members that can be reached, by endpoint. answers holds the status codes of each member's
	// next calls, and dials the errors of the next attempts to connect to an endpoint.
	listeners map[string]*bufconn.Listener
	answers   map[string][]codes.Code
	dials     map[string][]error
	calls     []call
}

type call struct{ member, method, key, token string }

func newFleet(t *testing.T, members ...string) *fleet {
	f := &fleet{t: t, listeners: map[string]*bufconn.Listener{}, answers: map[string][]codes.Code{}, dials: map[string][]error{}}
	for _, m := range members {
		l := bufconn.Listen(1 << 16)
		f.listeners[m] = l
		s := grpc.NewServer(grpc.UnaryInterceptor(
			func(ctx context.Context, req any, info *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
				return f.answer(ctx, m, req, info, h)
			}))
		vmv1.RegisterVmServiceServer(s, answering{})
		done := make(chan struct{})
		go func() { defer close(done); _ = s.Serve(l) }()
		t.Cleanup(func() { s.Stop(); <-done })
	}
	return f
}

type answering struct {
	vmv1.UnimplementedVmServiceServer
}

func (answering) CreateVm(context.Context, *vmv1.CreateVmRequest) (*vmv1.VirtualMachine, error) {
	return &vmv1.VirtualMachine{Id: "1"}, nil
}
func (answering) GetVm(context.Context, *vmv1.GetVmRequest) (*vmv1.VirtualMachine, error) {
	return &vmv1.VirtualMachine{Id: "1"}, nil
}
func (answering) RebootVm(context.Context, *vmv1.RebootVmRequest) (*vmv1.VirtualMachine, error) {
	return &vmv1.VirtualMachine{Id: "1"}, nil
}

func (f *fleet) answer(ctx context.Context, member string, req any, info *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	first := func(k string) string { return strings.Join(md.Get(k), ",") }
	f.mu.Lock()
	f.calls = append(f.calls, call{member, info.FullMethod[strings.LastIndexByte(info.FullMethod, '/')+1:], first("idempotency-key"), first("authorization")})
	code := codes.OK
	if next := f.answers[member]; len(next) > 0 {
		code, f.answers[member] = next[0], next[1:]
	}
	f.mu.Unlock()
	if code != codes.OK {
		return nil, status.Error(code, "the status that the test set")
	}
	return h(ctx, req)
}

func (f *fleet) dial(ctx context.Context, endpoint string) (net.Conn, error) {
	f.mu.Lock()
	l := f.listeners[endpoint]
	var err error
	if next := f.dials[endpoint]; len(next) > 0 {
		err, f.dials[endpoint] = next[0], next[1:]
	}
	f.mu.Unlock()
	if err != nil || l == nil {
		return nil, errors.Join(err, refused())
	}
	return l.DialContext(ctx)
}

func refused() error {
	return &net.OpError{Op: "dial", Net: "tcp", Err: &net.OpError{Op: "connect", Err: syscall.ECONNREFUSED}}
}

func (f *fleet) open(endpoints ...string) *Conn {
	c, err := Open(Options{Endpoints: endpoints, Dialer: f.dial, Token: "t0k", Plaintext: true})
	require.NoError(f.t, err)
	f.t.Cleanup(func() { require.NoError(f.t, c.Close()) })
	return c
}

func (f *fleet) members() (names []string) {
	for _, c := range f.calls {
		names = append(names, c.member)
	}
	return names
}

func TestUnreachableEndpointIsSkipped(t *testing.T) {
	f := newFleet(t, "b:1", "c:1")
	c := f.open("a:1", "b:1", "c:1")
	for range 2 {
		_, err := vmv1.NewVmServiceClient(c).RebootVm(t.Context(), &vmv1.RebootVmRequest{})
		require.NoError(t, err, "a request that was not sent may be sent to the next endpoint, even if it is not idempotent")
	}
	require.Equal(t, []string{"b:1", "b:1"}, f.members(), "later calls must use the endpoint that was reached")
	require.Equal(t, "Bearer t0k", f.calls[0].token)
	require.Empty(t, f.calls[0].key)
}

func TestUnavailableEndpointIsSkipped(t *testing.T) {
	f := newFleet(t, "a:1", "b:1")
	f.answers["a:1"] = []codes.Code{codes.Unavailable}
	_, err := vmv1.NewVmServiceClient(f.open("a:1", "b:1")).GetVm(t.Context(), &vmv1.GetVmRequest{})
	require.NoError(t, err)
	require.Equal(t, []string{"a:1", "b:1"}, f.members())
}

func TestCreateIsRetriedWithItsIdempotencyKey(t *testing.T) {
	f := newFleet(t, "a:1", "b:1")
	f.answers["a:1"] = []codes.Code{codes.Unavailable, codes.Unavailable}
	f.answers["b:1"] = []codes.Code{codes.Unavailable}
	f.dials["a:1"] = []error{refused()} // the first attempt to connect fails
	f.dials["b:1"] = []error{refused()}
	create := func() {
		_, err := vmv1.NewVmServiceClient(f.open("a:1", "b:1")).CreateVm(t.Context(), &vmv1.CreateVmRequest{})
		require.NoError(t, err)
	}
	create()
	require.Equal(t, []string{"a:1", "b:1", "a:1", "b:1"}, f.members())
	key := f.calls[0].key
	require.Len(t, key, 36)
	for _, c := range f.calls {
		require.Equal(t, key, c.key)
	}
	create()
	require.NotEqual(t, key, f.calls[4].key, "another create must have another idempotency key")
}

// TestCreatesOfOneConnHaveKeysOfTheirOwn checks that a command can create several objects: the control plane refuses a
// key that another request has used.
func TestCreatesOfOneConnHaveKeysOfTheirOwn(t *testing.T) {
	f := newFleet(t, "a:1")
	vms := vmv1.NewVmServiceClient(f.open("a:1"))
	for range 2 {
		_, err := vms.CreateVm(t.Context(), &vmv1.CreateVmRequest{})
		require.NoError(t, err)
	}
	require.Len(t, f.calls[1].key, 36)
	require.NotEqual(t, f.calls[0].key, f.calls[1].key)
}

func TestCallsThatAreNotIdempotentAreNotRetried(t *testing.T) {
	f := newFleet(t, "a:1", "b:1")
	f.answers["a:1"] = []codes.Code{codes.Unavailable}
	_, err := vmv1.NewVmServiceClient(f.open("a:1", "b:1")).RebootVm(t.Context(), &vmv1.RebootVmRequest{})
	var u *Unavailable
	require.ErrorAs(t, err, &u)
	require.Equal(t, "a:1", u.Endpoint)
	require.True(t, u.Doubtful)
	require.Len(t, f.calls, 1)
}

func TestNoRetryAfterTheFirstAnswer(t *testing.T) {
	for _, code := range []codes.Code{codes.Internal, codes.NotFound, codes.DeadlineExceeded, codes.ResourceExhausted} {
		f := newFleet(t, "a:1", "b:1")
		f.answers["a:1"] = []codes.Code{code}
		_, err := vmv1.NewVmServiceClient(f.open("a:1", "b:1")).CreateVm(t.Context(), &vmv1.CreateVmRequest{})
		require.Equal(t, code, status.Code(err))
		require.Len(t, f.calls, 1)
	}
}

func TestCreateRetriesEnd(t *testing.T) {
	f := newFleet(t, "a:1")
	for range 1000 {
		f.answers["a:1"] = append(f.answers["a:1"], codes.Unavailable)
	}
	c, err := Open(Options{Endpoints: []string{"a:1"}, Dialer: f.dial, CreatePatience: 250 * time.Millisecond})
	require.NoError(t, err)
	defer c.Close()
	_, err = vmv1.NewVmServiceClient(c).CreateVm(t.Context(), &vmv1.CreateVmRequest{})
	var u *Unavailable
	require.ErrorAs(t, err, &u)
	require.True(t, u.Doubtful, "the error must say that the VM may exist")
	require.Equal(t, codes.Unavailable, status.Code(err))
	require.NotEmpty(t, f.calls)
	require.NotEmpty(t, f.answers["a:1"], "the retries must end before the member's last UNAVAILABLE")
	require.Empty(t, f.calls[0].token)
}

func TestCanceledContextEndsRetries(t *testing.T) {
	f := newFleet(t)
	ctx, cancel := context.WithCancel(t.Context())
	c, err := Open(Options{Endpoints: []string{"a:1"}, Dialer: func(ctx context.Context, endpoint string) (net.Conn, error) {
		cancel()
		return f.dial(ctx, endpoint)
	}})
	require.NoError(t, err)
	defer c.Close()
	_, err = vmv1.NewVmServiceClient(c).CreateVm(ctx, &vmv1.CreateVmRequest{})
	require.Equal(t, codes.Canceled, status.Code(err))
}

// TestNoEndpointIsReachable calls three endpoints over TCP: a closed port, one that never responds and a web server. It
// checks that the *Unreachable error contains the right reason for each.
func TestNoEndpointIsReachable(t *testing.T) {
	listen := func(serve func(net.Conn)) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		var wg sync.WaitGroup
		var mu sync.Mutex
		var open []net.Conn
		wg.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				mu.Lock()
				open = append(open, conn)
				mu.Unlock()
				serve(conn)
			}
		})
		t.Cleanup(func() {
			_ = l.Close()
			wg.Wait()
			for _, conn := range open {
				_ = conn.Close()
			}
		})
		return l.Addr().String()
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	closed := l.Addr().String()
	require.NoError(t, l.Close())
	silent := listen(func(net.Conn) {})
	web := listen(func(c net.Conn) {
		_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"))
		_ = c.Close()
	})

	c, err := Open(Options{Endpoints: []string{closed, silent, web}, Connect: 300 * time.Millisecond})
	require.NoError(t, err)
	defer c.Close()
	_, err = vmv1.NewVmServiceClient(c).RebootVm(t.Context(), &vmv1.RebootVmRequest{})
	var u *Unreachable
	require.ErrorAs(t, err, &u)
	require.Equal(t, []Tried{
		{closed, "connection refused"},
		{silent, "accepts connections, but does not answer"},
		{web, errNotPlain.Error()},
	}, u.Tried)
	require.Equal(t, codes.Unavailable, status.Code(err))
}

func TestReasonOfFailure(t *testing.T) {
	for want, err := range map[string]error{
		"no such host":        &net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", Name: "x", IsNotFound: true}},
		"no answer within 3s": &net.OpError{Op: "dial", Err: context.DeadlineExceeded},
		"no route to host":    &net.OpError{Op: "dial", Err: syscall.EHOSTUNREACH},
	} {
		require.Equal(t, want, why(err, Connect))
	}
}

func TestRetryPoliciesNameExistingMethods(t *testing.T) {
	for method, p := range policies {
		name := strings.ReplaceAll(strings.TrimPrefix(method, "/"), "/", ".")
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
		require.NoError(t, err, method)
		// Exactly the methods that create something or move credit need an idempotency key to be retried.
		keyed := slices.ContainsFunc([]string{"Create", "Begin", "Register", "TopUp", "Refund", "Charge"}, func(verb string) bool {
			return strings.HasPrefix(string(d.Name()), verb)
		})
		require.Equal(t, p.create, keyed, method)
	}
}

// TestCallsCarryTheTenant checks that the metadata of each call contains the org and project of the connection's
// options.
func TestCallsCarryTheTenant(t *testing.T) {
	for _, o := range []Options{{Org: "acme", Project: "web"}, {Project: "web"}, {}} {
		o.Endpoints = []string{"127.0.0.1:1"}
		c, err := Open(o)
		require.NoError(t, err)
		md, _ := metadata.FromOutgoingContext(c.outgoing(t.Context()))
		for key, want := range map[string]string{"trivet-org": o.Org, "trivet-project": o.Project} {
			require.Equal(t, want, strings.Join(md.Get(key), ","))
		}
		require.NoError(t, c.Close())
	}
}

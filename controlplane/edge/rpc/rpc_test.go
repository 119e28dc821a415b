package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// handlers implements the VM and image services for tests. get determines the result of GetVm and the end of WatchVm.
type handlers struct {
	vmv1.UnimplementedVmServiceServer
	vmv1.UnimplementedImageServiceServer
	get func(context.Context) error
}

func (h *handlers) GetVm(ctx context.Context, in *vmv1.GetVmRequest) (*vmv1.VirtualMachine, error) {
	return &vmv1.VirtualMachine{Id: fmt.Sprint(len(in.GetVmId()))}, h.get(ctx)
}

func (h *handlers) WatchVm(in *vmv1.WatchVmRequest, s grpc.ServerStreamingServer[vmv1.VmEvent]) error {
	if err := s.Send(&vmv1.VmEvent{VmId: fmt.Sprint(len(in.GetVmId()))}); err != nil {
		return err
	}
	return h.get(s.Context())
}

func (h *handlers) UploadImagePart(_ context.Context, in *vmv1.UploadImagePartRequest) (*vmv1.UploadImagePartResponse, error) {
	return &vmv1.UploadImagePartResponse{CommittedSizeBytes: uint64(len(in.GetBody()))}, nil
}

// verifier accepts the tokens good and unproven, and the token once only the first time. It panics for the token panic
// and refuses any other. The field asked counts the verifications of once, and valid those of good.
type verifier struct{ asked, valid *atomic.Int64 }

func (v verifier) Verify(_ context.Context, token string) (*cloud.Caller, error) {
	switch token {
	case "good":
		v.valid.Add(1)
		return &cloud.Caller{User: "ada", Proof: cloud.ProofPassword}, nil
	case "unproven":
		return &cloud.Caller{User: "ada", Proof: cloud.ProofNone}, nil
	case "once":
		if v.asked.Add(1) == 1 {
			return &cloud.Caller{User: "ada", Proof: cloud.ProofPassword}, nil
		}
	case "panic":
		panic("secret of the verifier")
	}
	return nil, fault.New(fault.Unauthenticated, "the token is not valid")
}

type buffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (b *buffer) Write(p []byte) (int, error) { b.mu.Lock(); defer b.mu.Unlock(); return b.b.Write(p) }
func (b *buffer) String() string              { b.mu.Lock(); defer b.mu.Unlock(); return b.b.String() }

func serve(t *testing.T, h *handlers) (*grpc.ClientConn, *buffer) {
	return serveWith(t, h, newVerifier())
}

func newVerifier() verifier { return verifier{new(atomic.Int64), new(atomic.Int64)} }

// serveWith is serve with a verifier that the test can read.
func serveWith(t *testing.T, h *handlers, v verifier) (*grpc.ClientConn, *buffer) {
	log := &buffer{}
	s, health := New(Options{Verifier: v, Log: slog.New(slog.NewTextHandler(log, nil)), Metrics: grpcprom.NewServerMetrics(), Public: true})
	vmv1.RegisterVmServiceServer(s, h)
	vmv1.RegisterImageServiceServer(s, h)
	health.SetServingStatus("", healthv1.HealthCheckResponse_SERVING)
	listener := bufconn.Listen(1 << 20)
	var serving sync.WaitGroup
	serving.Go(func() { s.Serve(listener) })
	t.Cleanup(func() { s.Stop(); serving.Wait() })
	conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn, log
}

func with(t *testing.T, pairs ...string) context.Context {
	return metadata.AppendToOutgoingContext(t.Context(), pairs...)
}

// TestErrors checks which gRPC status callers get for each kind of error that a handler returns, for unary calls and
// for streams.
func TestErrors(t *testing.T) {
	inner := status.Error(codes.Unavailable, "dial tcp 127.0.0.2:2380: secret")
	for _, c := range []struct {
		name    string
		err     error
		code    codes.Code
		message string
		reason  string
		field   string
		retry   bool
		logged  bool
	}{
		{name: "a fault", err: fault.New(fault.NotFound, "no VM x"), code: codes.NotFound, message: "no VM x", reason: "NOT_FOUND"},
		{name: "a wrapped fault", err: fmt.Errorf("secret: %w", fault.New(fault.PermissionDenied, "no")), code: codes.PermissionDenied, message: "no", reason: "PERMISSION_DENIED"},
		{name: "a fault with a field", err: fault.Invalid("name", "is required"), code: codes.InvalidArgument, message: "name: is required", reason: "INVALID_ARGUMENT", field: "name"},
		{name: "a fault with a reason", err: fault.New(fault.ResourceExhausted, "full").WithReason("NO_HOST_FITS").With("n1", 3), code: codes.ResourceExhausted, message: "full", reason: "NO_HOST_FITS"},
		{name: "a fault that may be retried", err: fault.New(fault.Unavailable, "no leader").MayRetry(), code: codes.Unavailable, message: "no leader", reason: "UNAVAILABLE", retry: true},
		{name: "a fault of the kind TooLarge", err: fault.New(fault.TooLarge, "large"), code: codes.InvalidArgument, message: "large", reason: "INVALID_ARGUMENT"},
		{name: "a fault with a long message", err: fault.New(fault.NotFound, "%s", strings.Repeat("é", 1<<20)), code: codes.NotFound, message: strings.Repeat("é", maxMessage/2) + " …", reason: "NOT_FOUND"},
		{name: "a gRPC status", err: status.Error(codes.DataLoss, "said so"), code: codes.DataLoss, message: "said so"},
		{name: "an internal error", err: errors.New("secret"), code: codes.Internal, message: "internal error, request ", reason: "INTERNAL", logged: true},
		{name: "another program's status", err: fmt.Errorf("call member 2: %w", inner), code: codes.Internal, message: "internal error, request ", reason: "INTERNAL", logged: true},
		{name: "another program's deadline", err: fmt.Errorf("call: %w", status.Error(codes.DeadlineExceeded, "secret")), code: codes.DeadlineExceeded, message: "not finished in time", reason: "DEADLINE_EXCEEDED"},
		{name: "a deadline", err: fmt.Errorf("read: %w", context.DeadlineExceeded), code: codes.DeadlineExceeded, message: "not finished in time", reason: "DEADLINE_EXCEEDED"},
		{name: "a canceled call", err: fmt.Errorf("read: %w", context.Canceled), code: codes.Canceled, message: "canceled the call", reason: "CANCELLED"},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn, log := serve(t, &handlers{get: func(context.Context) error { return c.err }})
			vms := vmv1.NewVmServiceClient(conn)
			var header metadata.MD
			_, unary := vms.GetVm(with(t, "authorization", "Bearer good"), &vmv1.GetVmRequest{}, grpc.Header(&header))
			watch, err := vms.WatchVm(with(t, "authorization", "Bearer good"), &vmv1.WatchVmRequest{})
			require.NoError(t, err)
			_, err = watch.Recv()
			require.NoError(t, err)
			_, streamed := watch.Recv()
			for _, err := range []error{unary, streamed} {
				s := status.Convert(err)
				require.Equal(t, c.code, s.Code())
				require.Contains(t, s.Message(), c.message)
				require.NotContains(t, s.String(), "secret")
				var reason, field string
				var retry bool
				for _, d := range s.Details() {
					switch d := d.(type) {
					case *errdetails.ErrorInfo:
						reason = d.GetReason()
						require.Equal(t, domain, d.GetDomain())
						if c.name == "a fault with a reason" {
							require.Equal(t, map[string]string{"n1": "3"}, d.GetMetadata())
						}
					case *errdetails.BadRequest:
						field = d.GetFieldViolations()[0].GetField()
					case *errdetails.RetryInfo:
						retry = true
					}
				}
				require.Equal(t, c.reason, reason)
				require.Equal(t, c.field, field)
				require.Equal(t, c.retry, retry)
				f := FaultOf(err)
				require.Equal(t, []any{c.reason, c.field, c.retry}, []any{f.Reason, f.Field, f.Retry}, "the client must decode the same reason, field and retry flag")
			}
			id := header.Get("x-request-id")
			require.Len(t, id, 1)
			require.Equal(t, c.logged, log.String() != "")
			if c.logged {
				require.Contains(t, log.String(), "secret")
				require.Contains(t, log.String(), id[0])
				require.Contains(t, unary.Error(), id[0])
			}
		})
	}
}

// TestPanics checks that a panic in a handler or in the verifier fails only that call, with an internal error.
func TestPanics(t *testing.T) {
	conn, log := serve(t, &handlers{get: func(context.Context) error { panic("secret of the handler") }})
	vms := vmv1.NewVmServiceClient(conn)
	for _, token := range []string{"good", "panic"} {
		_, err := vms.GetVm(with(t, "authorization", "Bearer "+token), &vmv1.GetVmRequest{})
		require.Equal(t, codes.Internal, status.Code(err))
		require.NotContains(t, err.Error(), "secret")
		watch, err := vms.WatchVm(with(t, "authorization", "Bearer "+token), &vmv1.WatchVmRequest{})
		require.NoError(t, err)
		for err == nil {
			_, err = watch.Recv()
		}
		require.Equal(t, codes.Internal, status.Code(err))
	}
	require.Contains(t, log.String(), "secret of the handler")
	require.Contains(t, log.String(), "secret of the verifier")
}

// TestMessageSizes checks that messages are limited to 1.5 MiB, and those with image parts to 16 MiB.
func TestMessageSizes(t *testing.T) {
	conn, _ := serve(t, &handlers{get: func(context.Context) error { return nil }})
	vms, images := vmv1.NewVmServiceClient(conn), vmv1.NewImageServiceClient(conn)
	get := func(n int) error {
		_, err := vms.GetVm(with(t, "authorization", "Bearer good"), &vmv1.GetVmRequest{VmId: strings.Repeat("x", n)})
		return err
	}
	watch := func(n int) error {
		w, err := vms.WatchVm(with(t, "authorization", "Bearer good"), &vmv1.WatchVmRequest{VmId: strings.Repeat("x", n)})
		require.NoError(t, err)
		_, err = w.Recv()
		return err
	}
	upload := func(n int) error {
		_, err := images.UploadImagePart(with(t, "authorization", "Bearer good"), &vmv1.UploadImagePartRequest{Body: make([]byte, n)})
		return err
	}
	for name, c := range map[string]struct {
		err  error
		code codes.Code
	}{
		"a call that fits":                   {get(MaxPlain - 16), codes.OK},
		"a call that is too large":           {get(MaxPlain + 1), codes.InvalidArgument},
		"a stream message that fits":         {watch(MaxPlain - 16), codes.OK},
		"a stream message that is too large": {watch(MaxPlain + 1), codes.InvalidArgument},
		"an image part that fits":            {upload(8 << 20), codes.OK},
		"an image part that is too large":    {upload(MaxMessage + 1), codes.ResourceExhausted},
	} {
		require.Equal(t, c.code, status.Code(c.err), "%s: %v", name, c.err)
	}
}

// TestCallers checks that the handler gets the verified caller, its idempotency key, and a deadline.
func TestCallers(t *testing.T) {
	var seen *cloud.Caller
	var deadline time.Duration
	conn, _ := serve(t, &handlers{get: func(ctx context.Context) error {
		seen = auth.CallerOf(ctx)
		if at, ok := ctx.Deadline(); ok {
			deadline = time.Until(at)
		}
		require.Equal(t, seen != nil, seen != nil && seen.RequestID == RequestID(ctx) && RequestID(ctx) != "")
		return nil
	}})
	vms := vmv1.NewVmServiceClient(conn)
	for _, c := range []struct {
		name  string
		pairs []string
		code  codes.Code
		user  cloud.UserID
		key   string
	}{
		{"no token", nil, codes.Unauthenticated, "", ""},
		{"a valid token", []string{"authorization", "Bearer good"}, codes.OK, "ada", ""},
		{"a valid token and an idempotency key", []string{"authorization", "Bearer good", "idempotency-key", "k"}, codes.OK, "ada", "k"},
		{"an idempotency key that is too long", []string{"authorization", "Bearer good", "idempotency-key", strings.Repeat("k", 256)}, codes.InvalidArgument, "", ""},
		{"a bad token", []string{"authorization", "Bearer bad"}, codes.Unauthenticated, "", ""},
		{"another scheme", []string{"authorization", "Basic good"}, codes.Unauthenticated, "", ""},
	} {
		seen, deadline = nil, 0
		_, err := vms.GetVm(with(t, c.pairs...), &vmv1.GetVmRequest{})
		require.Equal(t, c.code, status.Code(err), c.name)
		if c.user == "" {
			require.Nil(t, seen, c.name)
			continue
		}
		require.Equal(t, c.user, seen.User)
		require.Equal(t, c.key, seen.IdempotencyKey)
		require.Positive(t, deadline)
		require.LessOrEqual(t, deadline, MaxUnary)
	}
}

// TestHealthAndReflection checks that the health and reflection services require no token.
func TestHealthAndReflection(t *testing.T) {
	conn, _ := serve(t, &handlers{})
	h, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{})
	require.NoError(t, err)
	require.Equal(t, healthv1.HealthCheckResponse_SERVING, h.GetStatus())
	r, err := reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	require.NoError(t, err)
	require.NoError(t, r.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}))
	list, err := r.Recv()
	require.NoError(t, err)
	var names []string
	for _, s := range list.GetListServicesResponse().GetService() {
		names = append(names, s.GetName())
	}
	require.Contains(t, names, "vmcontroller.v1.VmService")
	require.NoError(t, r.CloseSend())
}

func TestBodyHash(t *testing.T) {
	labels := func(v string) *vmv1.CreateVmRequest {
		m := map[string]string{}
		for i := range 50 {
			m[fmt.Sprint(i)] = v
		}
		return &vmv1.CreateVmRequest{Labels: m}
	}
	require.Equal(t, BodyHash(labels("a")), BodyHash(labels("a")), "the hash must not depend on the order of a map")
	require.NotEqual(t, BodyHash(labels("a")), BodyHash(labels("b")))
}

// TestPassthroughServices checks that methods of another protocol return that protocol's errors, without request IDs or
// error details of Trivet.
func TestPassthroughServices(t *testing.T) {
	guest := &Passthrough{
		Prefix: "/vmcontroller.v1.VmService/", MaxMessage: MaxPlain,
		Admit: func(ctx context.Context, _ string) (context.Context, bool, error) { return ctx, true, nil },
		Unary: func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			require.Empty(t, RequestID(ctx))
			require.Nil(t, auth.CallerOf(ctx), "the token must not be verified, because it is for the other protocol")
			return handler(ctx, req)
		},
		Stream: func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			require.Empty(t, RequestID(ss.Context()))
			return handler(srv, ss)
		},
	}
	s, _ := New(Options{Verifier: newVerifier(), Log: slog.New(slog.DiscardHandler), Metrics: grpcprom.NewServerMetrics(), Public: true, Passthrough: guest})
	h := &handlers{get: func(context.Context) error { return status.Error(codes.OutOfRange, "its own words") }}
	vmv1.RegisterVmServiceServer(s, h)
	l := bufconn.Listen(1 << 20)
	done := make(chan struct{})
	go func() { defer close(done); s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer bad")
	var header metadata.MD
	_, err = vmv1.NewVmServiceClient(conn).GetVm(ctx, &vmv1.GetVmRequest{VmId: "x"}, grpc.Header(&header))
	require.Equal(t, codes.OutOfRange, status.Code(err))
	require.Empty(t, status.Convert(err).Details())
	require.Empty(t, header.Get("x-request-id"))
	stream, err := vmv1.NewVmServiceClient(conn).WatchVm(ctx, &vmv1.WatchVmRequest{VmId: "x"})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	_, err = stream.Recv()
	require.Equal(t, codes.OutOfRange, status.Code(err))
}

// TestStreamEndsWithItsToken checks that a stream ends with Unauthenticated when its token becomes invalid, and
// continues while the token is valid.
func TestStreamEndsWithItsToken(t *testing.T) {
	for token, code := range map[string]codes.Code{"once": codes.Unauthenticated, "good": codes.Aborted} {
		t.Run(token, func(t *testing.T) {
			v := newVerifier()
			h := &handlers{get: func(ctx context.Context) error {
				for v.valid.Load() < 3 && ctx.Err() == nil {
					time.Sleep(time.Millisecond)
				}
				if ctx.Err() != nil {
					return ctx.Err()
				}
				return fault.New(fault.Aborted, "the stream continued after two checks of its token")
			}}
			conn, _ := serveWith(t, h, v)
			s, err := vmv1.NewVmServiceClient(conn).WatchVm(with(t, "authorization", "Bearer "+token), &vmv1.WatchVmRequest{})
			require.NoError(t, err)
			_, err = s.Recv()
			require.NoError(t, err)
			_, err = s.Recv()
			require.Equal(t, code, status.Code(err), "%v", err)
		})
	}
}

// Package rpc builds the gRPC servers of all services: request IDs, bearer tokens, errors with google.rpc details,
// panic recovery, deadlines, limits, metrics, reflection and the standard health service.
//
// New returns a Server, on which a service registers itself. Handlers return *fault.Fault errors. The package must not
// know records or services.
//
// Before a handler runs, an Intake limits the memory that callers can make a server use. It refuses calls by their
// headers. It lets the server read a message only after the message has arrived completely or, if the message is long,
// after its length was reserved in a budget. The comment of Intake states the reasons.
//
// Streams of callers with tokens are limited in number (streams.go) and in the bytes that are buffered for clients that
// do not read (unsent.go). SendMsg of such a stream waits until the client has read most of the earlier messages. A
// handler that calls SendMsg with a Lazy has its message encoded only after this wait.
package rpc

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime/debug"
	"strings"
	"time"

	"github.com/google/uuid"
	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of a gRPC server:
const (
	// MaxMessage is the maximum size in bytes of a part of an image upload, MaxPlain that of all other messages of
	// tenants.
	MaxMessage = 16 << 20
	MaxPlain   = 3 << 19
	// MaxUnary is the deadline of a unary call if the client set none or a later one. It is longer than the longest
	// wait of a handler: the stop of a VM, which may take 600 s plus a margin.
	MaxUnary = 11 * time.Minute
	// Workers is the number of goroutines that are reused for calls; further calls start new ones. The stack of a
	// reused goroutine has already grown. In a new goroutine this growth takes a sixth of the time of a short call.
	Workers = 1024
)

// Options configures a server.
type Options struct {
	// Verifier verifies bearer tokens. It is nil for a port whose callers authenticate with a certificate.
	Verifier auth.Verifier
	// Credentials holds the credentials of the listener; nil for plaintext.
	Credentials credentials.TransportCredentials
	// CallerOf determines the caller of a call from the call's connection. It is for ports without a Verifier.
	CallerOf func(context.Context) (*cloud.Caller, error)
	// If Certified is true, callers without a client certificate may call only the methods in Open, which holds full
	// names. It is for ports without a Verifier that accept connections from such callers.
	Certified bool
	Open      []string
	Log       *slog.Logger
	Metrics   *grpcprom.ServerMetrics
	// Audit is notified of calls that were refused, and of mutating calls that failed. Optional.
	Audit auth.Auditor
	// If Public is true, the port is one for tenants, and reflection and the health service are registered on it.
	Public bool
	// MaxMessage is the limit of every message in bytes. 0 means the limits for tenants: the constants MaxMessage for
	// image parts and MaxPlain for all others.
	MaxMessage int
	// Passthrough serves the methods of another protocol, such as etcd's, on the same port. Optional.
	Passthrough *Passthrough
	// Streams counts the streams of callers with tokens. All servers of a member must have the same one. If it is nil,
	// the server creates its own.
	Streams *Streams
}

// Passthrough configures the services of another protocol, with its own errors, metadata and callers. The interceptors
// of this package do not handle calls of these services; only the metrics count them.
type Passthrough struct {
	// Prefix is the prefix of the full names of the protocol's methods. No other method may have a name with this
	// prefix.
	Prefix string
	// Admit is called when the headers of a call have arrived, before its message is read. If it returns an error, the
	// call is refused. The interceptors Unary and Stream must make the same checks. Unary gets the context that Admit
	// returns, which can hold the result of the authorization, so that Unary need not repeat it. known is true if the
	// caller is on loopback or has shown a credential.
	Admit func(ctx context.Context, method string) (_ context.Context, known bool, err error)
	// MaxMessage is the limit of a message of these services, in bytes.
	MaxMessage int
	Unary      grpc.UnaryServerInterceptor
	Stream     grpc.StreamServerInterceptor
	// Streams counts the bytes that clients have not read. It must be the Streams whose method Bound the interceptor
	// Stream calls. Optional.
	Streams *Streams
}

// New returns a server and its health service. If opts.Public or opts.Certified is true, the server has an Intake, which
// limits the memory of unfinished calls. If both are false, no Intake is needed, because TLS refuses every caller
// without a certificate.
func New(opts Options) (*Server, *health.Server) {
	limit := opts.MaxMessage
	if limit == 0 {
		limit = MaxMessage
	}
	e := &edge{opts: opts}
	if opts.Verifier != nil {
		if e.opts.Streams == nil {
			e.opts.Streams = NewStreams()
		}
		e.checks = auth.NewRechecker(opts.Verifier)
		opts.Credentials = countConns(opts.Credentials, e.opts.Streams)
	}
	if opts.Passthrough != nil && opts.Passthrough.Streams != nil {
		opts.Credentials = opts.Passthrough.Streams.Credentials(opts.Credentials)
	}
	unary := []grpc.UnaryServerInterceptor{opts.Metrics.UnaryServerInterceptor(), e.unary}
	stream := []grpc.StreamServerInterceptor{opts.Metrics.StreamServerInterceptor(), e.stream}
	settings := []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(unary...), grpc.ChainStreamInterceptor(stream...),
		grpc.MaxRecvMsgSize(limit), grpc.MaxConcurrentStreams(4096),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 4 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 20 * time.Second, Timeout: 10 * time.Second}),
		grpc.ConnectionTimeout(10 * time.Second),
		Codec(),
	}
	var in *Intake
	if opts.Public || opts.Certified {
		in = NewIntake(MaxStreams, e.authenticate)
		settings = append(settings, in.Settings(opts.Credentials)...)
	} else if opts.Credentials != nil {
		settings = append(settings, grpc.Creds(opts.Credentials))
	}
	if opts.Public {
		settings = append(settings, grpc.NumStreamWorkers(Workers))
	}
	s := NewServer(in, settings...)
	h := health.NewServer()
	if opts.Public {
		healthv1.RegisterHealthServer(s, h)
		reflection.Register(s)
	}
	return s, h
}

type edge struct {
	opts   Options
	checks *auth.Rechecker // nil without a Verifier
}

// name creates the request ID of a call, puts it into the context, and sends it in the response header x-request-id.
func name(ctx context.Context) (context.Context, string) {
	id := uuid.NewString()
	grpc.SetHeader(ctx, metadata.Pairs("x-request-id", id))
	return context.WithValue(ctx, requestID{}, id), id
}

// admit returns a context with the verified caller. A call without a token gets a context without a caller: auth.Admit
// then refuses it, and methods that need no caller do not call auth.Admit.
func (e *edge) admit(ctx context.Context) (context.Context, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	var caller *cloud.Caller
	switch header := md.Get("authorization"); {
	case authenticatedCaller(ctx) != nil:
		caller = authenticatedCaller(ctx)
	case e.opts.CallerOf != nil:
		c, err := e.opts.CallerOf(ctx)
		if err != nil {
			return ctx, err
		}
		caller = c
	case len(header) > 0 && e.opts.Verifier != nil:
		token, err := auth.Bearer(header[0])
		if err != nil {
			return ctx, err
		}
		if caller, err = e.opts.Verifier.Verify(ctx, token); err != nil {
			return ctx, err
		}
	}
	if caller == nil {
		return ctx, nil
	}
	caller.RequestID, caller.Address = RequestID(ctx), Address(ctx)
	if keys := md.Get("idempotency-key"); len(keys) > 0 {
		if err := auth.CheckIdempotencyKey("idempotency-key", keys[0]); err != nil {
			return ctx, err
		}
		caller.IdempotencyKey = keys[0]
	}
	var err error
	if caller.Chosen, err = auth.Chosen("trivet-org", md.Get("trivet-org"), "trivet-project", md.Get("trivet-project")); err != nil {
		return ctx, err
	}
	if header := md.Get("authorization"); len(header) > 0 {
		if token, err := auth.Bearer(header[0]); err == nil {
			ctx = auth.WithToken(ctx, token)
		}
	}
	return auth.With(auth.WithProjects(ctx, e.opts.Verifier), caller, auth.RPC), nil
}

type requestID struct{}

// RequestID returns the ID of the call that ctx belongs to, or "" if there is none.
func RequestID(ctx context.Context) string {
	id, _ := ctx.Value(requestID{}).(string)
	return id
}

const uploadPart = "/vmcontroller.v1.ImageService/UploadImagePart"

func (e *edge) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if g := e.opts.Passthrough; g != nil && strings.HasPrefix(info.FullMethod, g.Prefix) {
		return g.Unary(ctx, req, info, handler)
	}
	ctx, cancel := context.WithTimeout(ctx, MaxUnary)
	defer cancel()
	ctx, id := name(ctx)
	var caller *cloud.Caller
	resp, err := e.call(func() (any, error) {
		ctx, err := e.admit(ctx)
		if err != nil {
			return nil, err
		}
		if caller = auth.CallerOf(ctx); caller != nil {
			caller.Target = target(req)
		}
		return handler(ctx, req)
	})
	if err != nil {
		e.report(ctx, caller, info.FullMethod, err)
		return nil, e.failure(id, info.FullMethod, err)
	}
	auth.ReportSuccess(e.opts.Audit, caller, auth.Method(info.FullMethod))
	return resp, nil
}

// report passes a failed call to the audit. It does nothing on ports that are not public, and for methods that need no
// authorization.
func (e *edge) report(ctx context.Context, caller *cloud.Caller, method string, err error) {
	f, ok := fault.From(err)
	if !ok {
		f = interrupted(err)
	}
	if f == nil {
		f = fault.New(fault.Internal, "internal error")
	}
	if e.opts.Public && auth.Open[auth.Method(method)] == "" {
		auth.ReportFailure(e.opts.Audit, caller, auth.Method(method), f, RequestID(ctx), Address(ctx))
	}
}

// Address returns the IP address that a call came from, without the port, or "" if it is unknown.
func Address(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok || p.Addr == nil {
		return ""
	}
	host, _, err := net.SplitHostPort(p.Addr.String())
	if err != nil {
		return p.Addr.String()
	}
	return host
}

func (e *edge) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if g := e.opts.Passthrough; g != nil && strings.HasPrefix(info.FullMethod, g.Prefix) {
		return g.Stream(srv, ss, info, handler)
	}
	ctx, id := name(ss.Context())
	var caller *cloud.Caller
	_, err := e.call(func() (any, error) {
		ctx, err := e.admit(ctx)
		if err != nil {
			return nil, err
		}
		if caller = auth.CallerOf(ctx); e.opts.Verifier == nil {
			return nil, handler(srv, &stream{ServerStream: ss, ctx: ctx})
		}
		return nil, e.limitStream(ctx, ss, func(ss grpc.ServerStream) error { return handler(srv, ss) })
	})
	if err != nil {
		e.report(ctx, caller, info.FullMethod, err)
	} else {
		auth.ReportSuccess(e.opts.Audit, caller, auth.Method(info.FullMethod))
	}
	return e.failure(id, info.FullMethod, err)
}

// stream is a ServerStream whose context holds the caller, and whose unsent messages are counted in flow.
type stream struct {
	grpc.ServerStream
	ctx  context.Context
	flow *flow // nil if the unsent messages of the stream are not counted
}

func (s *stream) Context() context.Context { return s.ctx }

func (s *stream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	if c := auth.CallerOf(s.ctx); c != nil && c.Target == "" {
		c.Target = target(m)
	}
	return nil
}

// call runs f and turns a panic into an error.
func (e *edge) call(f func() (any, error)) (resp any, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return f()
}

// failure converts an error to a gRPC status. A fault.Fault or a status is sent to the caller. A context that was
// canceled or timed out gives Canceled or DeadlineExceeded. Any other error is logged, and the caller gets an internal
// error with the request ID.
func (e *edge) failure(id, method string, err error) error {
	if err == nil {
		return nil
	}
	if f, ok := fault.From(err); ok {
		return Status(f).Err()
	}
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	if f := interrupted(err); f != nil {
		return Status(f).Err()
	}
	e.opts.Log.Error("call failed", "req", id, "method", method, "err", err)
	return Status(fault.New(fault.Internal, "internal error, request %s", id)).Err()
}

// interrupted returns a Canceled or DeadlineExceeded fault if err says that a call was canceled or timed out, and nil for
// all other errors. An error that wraps a status comes from another program and is not meant for the caller. Only the
// status code is used.
func interrupted(err error) *fault.Fault {
	s, _ := status.FromError(err)
	switch {
	case errors.Is(err, context.Canceled), s.Code() == codes.Canceled:
		return fault.New(fault.Canceled, "the caller canceled the call")
	case errors.Is(err, context.DeadlineExceeded), s.Code() == codes.DeadlineExceeded:
		return fault.New(fault.DeadlineExceeded, "the call was not finished in time")
	}
	return nil
}

// domain is the domain in the google.rpc.ErrorInfo of every error.
const domain = "trivet"

// maxMessage is the longest error message that is sent, in bytes. Longer ones are cut: a message may quote the request,
// and is sent in a header.
const maxMessage = 2 << 10

// Status converts a fault.Fault to a gRPC status. Its details contain ErrorInfo, BadRequest if the fault names a field,
// and RetryInfo if the call may be retried.
func Status(f *fault.Fault) *status.Status {
	message := f.Message
	if len(message) > maxMessage {
		message = strings.ToValidUTF8(message[:maxMessage], "") + " …"
	}
	s := status.New(f.Kind.RPC(), message)
	info := &errdetails.ErrorInfo{Reason: f.Reason, Domain: domain, Metadata: map[string]string{}}
	if info.Reason == "" {
		info.Reason = code.Code(s.Code()).String()
	}
	for k, v := range f.Details {
		info.Metadata[k] = fmt.Sprint(v)
	}
	details := []protoadapt.MessageV1{info}
	if f.Field != "" {
		details = append(details, &errdetails.BadRequest{
			FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: f.Field, Description: message}},
		})
	}
	if f.Retry {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(f.RetryDelay())})
	}
	if withDetails, err := s.WithDetails(details...); err == nil {
		return withDetails
	}
	return s
}

// FaultOf converts a gRPC status, returned by another program of the platform, to a fault.Fault. It is the inverse of
// Status.
func FaultOf(err error) *fault.Fault {
	s, _ := status.FromError(err)
	f := fault.New(fault.FromRPC(s.Code()), "%s", s.Message())
	for _, d := range s.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			f.Reason = d.GetReason()
			for k, v := range d.GetMetadata() {
				f = f.With(k, v)
			}
		case *errdetails.RetryInfo:
			f = f.MayRetryAfter(d.GetRetryDelay().AsDuration())
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				f.Field = v.GetField()
			}
		}
	}
	return f.Because(err)
}

// BodyHash returns the SHA-256 of an encoded request. It is stored with the idempotency key, so that another request
// with the same key is detected.
func BodyHash(m proto.Message) [32]byte {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return [32]byte{}
	}
	return sha256.Sum256(b)
}

// Unimplemented returns the error of a method that this version does not implement. Check the arguments first, so that
// invalid ones get their own error.
func Unimplemented(method string) error {
	return fault.New(fault.Unimplemented, "%s is not served yet", method)
}

// Replayed sends the response header idempotency-replayed if replayed is true, that is, if the response was stored for
// an earlier call with the same idempotency key.
func Replayed(ctx context.Context, replayed bool) {
	if replayed {
		grpc.SetHeader(ctx, metadata.Pairs("idempotency-replayed", "true"))
	}
}

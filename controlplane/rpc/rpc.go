// Package rpc is the half of every gRPC service that does not depend on the service: request ids, bearer tokens,
// errors with google.rpc details, recovery, deadlines, limits, metrics, reflection and the standard health service.
//
// A service registers itself on the *grpc.Server that New builds and returns fault.Faults. It knows no records and no
// service.
package rpc

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/google/uuid"
	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of a server.
const (
	// MaxMessage is for image parts; everything else must fit MaxPlain.
	MaxMessage = 16 << 20
	MaxPlain   = 3 << 19
	// MaxUnary bounds a call whose client set no deadline. It exceeds the longest wait, a stop of 600 s and its margin.
	MaxUnary = 11 * time.Minute
)

// Options of a server.
type Options struct {
	// Verifier checks bearer tokens; nil for a port whose callers prove themselves by certificate.
	Verifier auth.Verifier
	// Credentials of the listener; nil for plaintext.
	Credentials credentials.TransportCredentials
	// CallerOf reads the caller from the connection, where there is no Verifier.
	CallerOf func(context.Context) (*cloud.Caller, error)
	Log      *slog.Logger
	Metrics  *grpcprom.ServerMetrics
	// Reflection and the health service are registered when set.
	Public bool
	// MaxMessage is the limit of a message in bytes. 0 is what tenants may send.
	MaxMessage int
}

// New builds a server.
func New(opts Options) (*grpc.Server, *health.Server) {
	limit := opts.MaxMessage
	if limit == 0 {
		limit = MaxMessage
	}
	e := &edge{opts}
	unary := []grpc.UnaryServerInterceptor{opts.Metrics.UnaryServerInterceptor(), e.unary}
	stream := []grpc.StreamServerInterceptor{opts.Metrics.StreamServerInterceptor(), e.stream}
	settings := []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(unary...), grpc.ChainStreamInterceptor(stream...),
		grpc.MaxRecvMsgSize(limit), grpc.MaxConcurrentStreams(4096),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 4 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 20 * time.Second, Timeout: 10 * time.Second}),
		grpc.ConnectionTimeout(10 * time.Second),
	}
	if opts.Credentials != nil {
		settings = append(settings, grpc.Creds(opts.Credentials))
	}
	s := grpc.NewServer(settings...)
	h := health.NewServer()
	if opts.Public {
		healthv1.RegisterHealthServer(s, h)
		reflection.Register(s)
	}
	return s, h
}

type edge struct{ opts Options }

// admit puts the verified caller into the context. A call without a token goes on without a caller: Admit refuses it,
// and the calls that need none never ask.
func (e *edge) admit(ctx context.Context) (context.Context, string, error) {
	id := uuid.NewString()
	ctx = context.WithValue(ctx, requestID{}, id)
	grpc.SetHeader(ctx, metadata.Pairs("x-request-id", id))
	md, _ := metadata.FromIncomingContext(ctx)
	var caller *cloud.Caller
	switch header := md.Get("authorization"); {
	case e.opts.CallerOf != nil:
		c, err := e.opts.CallerOf(ctx)
		if err != nil {
			return ctx, id, err
		}
		caller = c
	case len(header) > 0 && e.opts.Verifier != nil:
		token, err := auth.Bearer(header[0])
		if err != nil {
			return ctx, id, err
		}
		if caller, err = e.opts.Verifier.Verify(ctx, token); err != nil {
			return ctx, id, err
		}
	}
	if caller == nil {
		return ctx, id, nil
	}
	caller.RequestID = id
	if keys := md.Get("idempotency-key"); len(keys) > 0 {
		if caller.IdempotencyKey = keys[0]; len(caller.IdempotencyKey) > cloud.MaxIdempotencyKey {
			return ctx, id, fault.Invalid("idempotency-key", "at most %d bytes", cloud.MaxIdempotencyKey)
		}
	}
	return auth.With(ctx, caller, auth.RPC), id, nil
}

type requestID struct{}

// RequestID is the id of the call that a context belongs to.
func RequestID(ctx context.Context) string {
	id, _ := ctx.Value(requestID{}).(string)
	return id
}

const uploadPart = "/vmcontroller.v1.ImageService/UploadImagePart"

func (e *edge) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, MaxUnary)
	defer cancel()
	ctx, id, err := e.admit(ctx)
	if err != nil {
		return nil, e.failure(id, info.FullMethod, err)
	}
	if m, ok := req.(proto.Message); ok && e.opts.Public && info.FullMethod != uploadPart && proto.Size(m) > MaxPlain {
		return nil, e.failure(id, info.FullMethod, fault.New(fault.TooLarge, "the message is larger than %d bytes", MaxPlain))
	}
	resp, err := e.call(func() (any, error) { return handler(ctx, req) })
	if err != nil {
		return nil, e.failure(id, info.FullMethod, err)
	}
	return resp, nil
}

func (e *edge) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx, id, err := e.admit(ss.Context())
	if err != nil {
		return e.failure(id, info.FullMethod, err)
	}
	_, err = e.call(func() (any, error) { return nil, handler(srv, &stream{ss, ctx}) })
	return e.failure(id, info.FullMethod, err)
}

type stream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *stream) Context() context.Context { return s.ctx }

func (e *edge) call(f func() (any, error)) (resp any, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return f()
}

// failure makes a status of an error. What is neither a Fault nor a status is ours: the log has it.
func (e *edge) failure(id, method string, err error) error {
	if err == nil {
		return nil
	}
	f, ok := fault.From(err)
	if !ok {
		if _, isStatus := status.FromError(err); isStatus {
			return err
		}
		switch {
		case errors.Is(err, context.Canceled):
			f = fault.New(fault.Canceled, "the caller hung up")
		case errors.Is(err, context.DeadlineExceeded):
			f = fault.New(fault.DeadlineExceeded, "the call was not finished in time")
		default:
			f = fault.New(fault.Internal, "internal error, request %s", id)
			e.opts.Log.Error("call failed", "req", id, "method", method, "err", err)
		}
	}
	return Status(f).Err()
}

// domain of the ErrorInfo that every error carries.
const domain = "trivet"

// Status is a Fault as gRPC says it: ErrorInfo always, BadRequest for a field.
func Status(f *fault.Fault) *status.Status {
	s := status.New(f.Kind.RPC(), f.Message)
	reason := f.Reason
	if reason == "" {
		reason = f.Kind.REST(fault.VM).Code
	}
	info := &errdetails.ErrorInfo{Reason: reason, Domain: domain, Metadata: map[string]string{}}
	for k, v := range f.Details {
		info.Metadata[k] = fmt.Sprint(v)
	}
	var field *errdetails.BadRequest
	if f.Field != "" {
		field = &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: f.Field, Description: f.Message}}}
	}
	withDetails, err := s.WithDetails(info)
	if err == nil && field != nil {
		withDetails, err = withDetails.WithDetails(field)
	}
	if err != nil {
		return s
	}
	return withDetails
}

// FaultOf is the Fault that a status from another of our programs stands for.
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
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				f.Field = v.GetField()
			}
		}
	}
	return f.Because(err)
}

// BodyHash is the hash of a request, for idempotency keys.
func BodyHash(m proto.Message) [32]byte {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return [32]byte{}
	}
	return sha256.Sum256(b)
}

// Unimplemented is the answer of a call that this version does not serve, said after its arguments were checked.
func Unimplemented(method string) error {
	return fault.New(fault.Unimplemented, "%s is not served yet", method)
}

// Replayed tells a caller that the answer is that of an earlier call with the same idempotency key.
func Replayed(ctx context.Context, replayed bool) {
	if replayed {
		grpc.SetHeader(ctx, metadata.Pairs("idempotency-replayed", "true"))
	}
}

package rpc

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Server is a gRPC server whose calls pass through an Intake before their handlers.
type Server struct {
	*grpc.Server
	intake *Intake // nil if the listener requires a client certificate
}

// NewServer returns a gRPC server with the given options, which must include i.Settings unless i is nil. Register
// services on the returned Server, not on its embedded grpc.Server.
func NewServer(i *Intake, settings ...grpc.ServerOption) *Server {
	return &Server{Server: grpc.NewServer(settings...), intake: i}
}

// RegisterService implements grpc.ServiceRegistrar. It wraps each handler, so that the Intake admits the call first.
func (s *Server) RegisterService(desc *grpc.ServiceDesc, impl any) {
	if s.intake == nil {
		s.Server.RegisterService(desc, impl)
		return
	}
	guarded := *desc
	guarded.Methods = make([]grpc.MethodDesc, len(desc.Methods))
	for k, m := range desc.Methods {
		name := "/" + desc.ServiceName + "/" + m.MethodName
		s.intake.methods[name] = true
		guarded.Methods[k] = grpc.MethodDesc{MethodName: m.MethodName, Handler: s.intake.unary(name, m.Handler)}
	}
	guarded.Streams = make([]grpc.StreamDesc, len(desc.Streams))
	for k, m := range desc.Streams {
		name := "/" + desc.ServiceName + "/" + m.StreamName
		s.intake.methods[name] = true
		m.Handler = s.intake.stream(name, m.ClientStreams, m.Handler)
		guarded.Streams[k] = m
	}
	s.Server.RegisterService(&guarded, impl)
}

// unary wraps the handler of a unary method. gRPC calls the wrapper before the message is read and before the
// interceptor runs.
func (i *Intake) unary(method string, handler grpc.MethodHandler) grpc.MethodHandler {
	return func(srv any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
		// refuse returns err through the interceptor, which converts the error, counts the call and reports it to the
		// audit.
		refuse := func(ctx context.Context, err error) (any, error) {
			if interceptor == nil {
				return nil, err
			}
			return interceptor(ctx, nil, &grpc.UnaryServerInfo{Server: srv, FullMethod: method},
				func(context.Context, any) (any, error) { return nil, err })
		}
		r, err := i.receiver(ctx, method)
		if err != nil {
			return refuse(ctx, err)
		}
		defer r.call.forget()
		admitted, err := r.admits(ctx, false)
		if err != nil {
			return refuse(admitted, err)
		}
		var refused bool
		resp, err := handler(srv, admitted, func(m any) error {
			refused, err = r.receive(ctx, false, func() error { return decode(m) })
			return err
		}, interceptor)
		if refused {
			resp, err = refuse(admitted, err)
		}
		// Delay the response here and not earlier, because the memory of the message is no longer in use here.
		if r.Holder != "" && status.Code(err) == codes.ResourceExhausted {
			i.refusals.Wait(ctx, r.Holder)
		}
		return resp, err
	}
}

// stream wraps the handler of a streaming method. When gRPC calls the wrapper, the interceptor has already run. The
// wrapper admits the call and then runs the handler. many is true for a client stream.
func (i *Intake) stream(method string, many bool, handler grpc.StreamHandler) grpc.StreamHandler {
	return func(srv any, ss grpc.ServerStream) error {
		r, err := i.receiver(ss.Context(), method)
		if err != nil {
			return err
		}
		defer r.call.forget()
		if _, err := r.admits(ss.Context(), many); err != nil {
			return err
		}
		return handler(srv, &received{ss, r, many})
	}
}

// received is a ServerStream whose messages are received within the limits of a receiver.
type received struct {
	grpc.ServerStream
	receiver *receiver
	many     bool
}

// RecvMsg implements grpc.ServerStream. It returns an error if a limit is exceeded.
func (s *received) RecvMsg(m any) error {
	_, err := s.receiver.receive(s.Context(), s.many, func() error {
		// The context of s may have ended, for example because the token became invalid, while gRPC's own context has
		// not. gRPC would then continue to wait for the message, which counts against no budget any more.
		if err := endedBy(s.Context()); err != nil {
			return err
		}
		return s.ServerStream.RecvMsg(m)
	})
	return err
}

// endedBy returns the reason why the context of a call has ended, as a fault.Fault or a gRPC status. It returns nil if
// the context has not ended.
func endedBy(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) && !errors.Is(cause, context.DeadlineExceeded) {
		return cause
	}
	return status.FromContextError(ctx.Err()).Err()
}

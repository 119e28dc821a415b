package rpc

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Server is a gRPC server behind an Intake.
type Server struct {
	*grpc.Server
	intake *Intake // nil if the listener requires a client certificate
}

// NewServer returns a server with these settings, which must include i.Settings unless i is nil. Register services on
// the returned Server.
func NewServer(i *Intake, settings ...grpc.ServerOption) *Server {
	return &Server{Server: grpc.NewServer(settings...), intake: i}
}

// RegisterService implements grpc.ServiceRegistrar.
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

// unary wraps the handler of a method with one message. gRPC calls it before the message is read, and before the
// interceptor.
func (i *Intake) unary(method string, handler grpc.MethodHandler) grpc.MethodHandler {
	return func(srv any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
		// Pass the refusal through the interceptor, which converts the error, counts the call and records it in the
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
		// At this point the message is no longer referenced.
		if r.Holder != "" && status.Code(err) == codes.ResourceExhausted {
			i.refusals.Wait(ctx, r.Holder)
		}
		return resp, err
	}
}

// stream wraps the handler of a method with streams of messages. The interceptor has run; the handler admits the call.
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

// received is a stream that reads its messages through a receiver.
type received struct {
	grpc.ServerStream
	receiver *receiver
	many     bool
}

// RecvMsg implements grpc.ServerStream.
func (s *received) RecvMsg(m any) error {
	_, err := s.receiver.receive(s.Context(), s.many, func() error {
		// The stream may have been ended by its context alone, for example because its token became invalid. gRPC does
		// not know that context, and would wait for the message, which no budget counts then.
		if err := endedBy(s.Context()); err != nil {
			return err
		}
		return s.ServerStream.RecvMsg(m)
	})
	return err
}

// endedBy returns the reason why the context of a call has ended, as a Fault or a status, or nil if it has not.
func endedBy(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) && !errors.Is(cause, context.DeadlineExceeded) {
		return cause
	}
	return status.FromContextError(ctx.Err()).Err()
}

// Package etcdrpc serves the users' keys by etcd's own gRPC API: KV, Watch, Lease, Cluster, Maintenance and Auth.
//
// The servers are thin: what a request means is the Service's affair. This package says who may come in, ends streams of
// clients who will not do without a leader, counts and logs, and keeps etcd's statuses as they are. It must not know
// records, engines or consensus.
//
// # Who may come in
//
// KV, Watch, Lease and Authenticate: callers on loopback, with a client certificate that the port asks for, or with a
// bearer token of system:admin; everybody when Options.Open is set, or once etcd's Auth is enabled, whose rules hold
// then. Cluster, Maintenance and the rest of Auth: callers on loopback, with a certificate, with a token of
// system:admin, or as etcd's root; what a user may ask of Auth about themselves they may ask once Auth is enabled. All
// others get PERMISSION_DENIED.
//
// With Auth enabled a token of system:admin acts as the user root, so that a cloud's operator is not locked out by a lost
// password. Callers on loopback need a token of Auth then, as with etcd.
//
// A token of Auth comes as the metadata "token", as clientv3 sends it. "authorization" is the cloud's, or Auth's too. That
// of a stream is proved once, when it begins; whether its user still has it is asked for each of its requests.
package etcdrpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime/debug"
	"time"
	"unicode/utf8"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/auth"
	"github.com/trivet-cloud/trivet/controlplane/kv"
)

// Prefix is what the names of all methods served here begin with.
const Prefix = "/etcdserverpb."

// Options of a Server. All are required but where it says otherwise.
type Options struct {
	Service *kv.Service
	// Members answers Cluster; without it that is not served.
	Members Members
	// StrictReconfig refuses to add and remove members while others were not heard for five seconds, as etcd does unless it is
	// told otherwise. Without it a change is judged by who is heard now.
	StrictReconfig bool
	// Verifier checks the cloud's bearer tokens; nil where there are none.
	Verifier auth.Verifier
	// Open lets everybody read and write keys.
	Open bool
	// CommonName makes the common name of a client's certificate the user of whoever shows no token.
	CommonName bool
	// Dir is for files that are made to be sent.
	Dir string
	Log *slog.Logger
}

// Server serves one port or more.
type Server struct {
	opts    Options
	waiting streams
	open    openStreams
	slow    slowLog
}

// New makes a server. Run it.
func New(opts Options) *Server { return &Server{opts: opts, slow: slowLog{log: opts.Log}} }

// Run ends streams while there is no leader, until ctx ends.
func (s *Server) Run(ctx context.Context) { s.waiting.run(ctx, s.opts.Service) }

// Register adds the services to a gRPC server, which must have Unary and Stream as interceptors of these methods.
func (s *Server) Register(g *grpc.Server) {
	pb.RegisterKVServer(g, &keys{Service: s.opts.Service})
	pb.RegisterWatchServer(g, &watches{service: s.opts.Service})
	pb.RegisterLeaseServer(g, &leases{Service: s.opts.Service})
	pb.RegisterAuthServer(g, &users{Service: s.opts.Service})
	pb.RegisterMaintenanceServer(g, &maintenance{Service: s.opts.Service, dir: s.opts.Dir})
	if s.opts.Members != nil {
		pb.RegisterClusterServer(g, &cluster{members: s.opts.Members, service: s.opts.Service, strict: s.opts.StrictReconfig})
	}
}

// Unary is the interceptor of all methods with Prefix.
func (s *Server) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	begin := time.Now()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
		if err != nil {
			resp, err = nil, s.failure(ctx, info.FullMethod, err)
		}
		s.slow.add(ctx, info.FullMethod, req, resp, time.Since(begin), err)
	}()
	if s.opts.Service.IsLearner() && !forLearner(req) {
		return nil, rpctypes.ErrGRPCNotSupportedForLearner
	}
	if _, err := s.wantsLeader(ctx); err != nil {
		return nil, err
	}
	if ctx, err = s.admit(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	return handler(ctx, req)
}

// forLearner says whether a member that does not vote answers.
func forLearner(req any) bool {
	switch r := req.(type) {
	case *pb.StatusRequest:
		return true
	case *pb.RangeRequest:
		return r.Serializable
	}
	return false
}

// Stream is the interceptor of all streams with Prefix.
func (s *Server) Stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	ctx := ss.Context()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
		if err != nil {
			err = s.failure(ctx, info.FullMethod, err)
		}
	}()
	if s.opts.Service.IsLearner() && info.FullMethod != pb.Maintenance_Snapshot_FullMethodName {
		return rpctypes.ErrGRPCNotSupportedForLearner
	}
	wants, err := s.wantsLeader(ctx)
	if err != nil {
		return err
	}
	admitted, err := s.admit(ctx, info.FullMethod)
	if err != nil {
		return err
	}
	admitted = s.opts.Service.Begin(admitted)
	closed, err := s.open.take(ctx, s.opts.Service.Caller(admitted))
	if err != nil {
		return err
	}
	defer closed()
	governed, done := s.whileGoverning(admitted)
	defer done()
	admitted = governed
	if wants {
		led, cancel := context.WithCancelCause(admitted)
		defer cancel(nil)
		defer s.waiting.add(cancel)()
		admitted = led
	}
	if admitted != ctx {
		ss = &stream{ss, admitted}
	}
	return handler(srv, ss)
}

// stream is a stream with another context.
type stream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *stream) Context() context.Context { return s.ctx }

// wantsLeader says whether the client will not do without a leader, and fails when there is none, or when what it says of
// itself cannot be.
func (s *Server) wantsLeader(ctx context.Context) (bool, error) {
	if v := metadata.ValueFromIncomingContext(ctx, rpctypes.MetadataClientAPIVersionKey); len(v) > 0 && !utf8.ValidString(v[0]) {
		return false, rpctypes.ErrGRPCInvalidClientAPIVersion
	}
	if v := metadata.ValueFromIncomingContext(ctx, rpctypes.MetadataRequireLeaderKey); len(v) == 0 || v[0] != rpctypes.MetadataHasLeader {
		return false, nil
	}
	if s.opts.Service.Leader() == 0 {
		return true, rpctypes.ErrGRPCNoLeader
	}
	return true, nil
}

// failure keeps statuses as they are. What is none is ours: the log has it.
func (s *Server) failure(ctx context.Context, method string, err error) error {
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, io.EOF):
		if ctx.Err() != nil {
			return status.FromContextError(ctx.Err()).Err()
		}
		return status.Error(codes.Canceled, "etcdserver: request canceled")
	}
	if st, ok := status.FromError(err); ok && st.Code() != codes.Unknown {
		return st.Err() // gRPC's own, of a stream that broke
	}
	s.opts.Log.Error("call failed", "method", method, "err", err)
	return status.Error(codes.Internal, "etcdserver: internal error")
}

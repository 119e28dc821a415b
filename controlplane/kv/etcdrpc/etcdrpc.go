// Package etcdrpc serves the tenants' keyspace by etcd's gRPC API: KV, Watch, Lease, Cluster, Maintenance and Auth.
//
// kv.Service implements the requests; this package only converts their messages. It also authorizes calls, ends streams
// of clients that require a leader when there is none, logs slow requests, limits streams, and returns etcd's statuses
// unchanged. It must not depend on records, engines or consensus.
//
// # Authorization
//
// A call is on loopback when both addresses of its connection are loopback addresses (package loopback). Credentials
// are:
//
//   - a bearer token of system:admin without a scope;
//   - a client certificate that the listener verified. Only the listeners of kv.etcd_listen verify certificates, and
//     only if kv.etcd_client_ca is set. While Auth is disabled, each holder of a certificate of that CA counts as an
//     operator of the cluster. While Auth is enabled, the certificate's common name is the user;
//   - with etcd's Auth enabled, a token of a user with the role root.
//
// The rules for the classes of methods are:
//
//   - Keys (KV, Watch, Lease, Authenticate): on loopback or with a credential. With Options.Open, all callers are
//     admitted. While Auth is enabled, all callers are admitted too, and Auth's rules apply.
//   - Administration that changes neither the cluster nor who has access (MemberList, Status, Alarm, Defragment, Hash,
//     HashKV, UserList, RoleList): on loopback or with a credential, as in etcd. These methods read, or concern the
//     tenants' keys, which a caller on loopback may delete anyway. Defragment and the hashes cost I/O, as reading all
//     keys does.
//   - Governing (MemberAdd, MemberRemove, MemberUpdate, MemberPromote, MoveLeader, Downgrade, Snapshot, changes of
//     Auth, and any method that is not listed): with a credential, on loopback too, since every local process is on
//     loopback. The members also run the platform's own raft group, so a change of them can stop the cloud. Changes of
//     Auth are governing because the role root is a credential: a local process could otherwise make itself root.
//     Snapshot is governing because its file holds the hashes of the users' passwords, and takes disk space from the
//     platform's records for as long as the client reads it.
//   - Queries of Auth about the caller itself (AuthStatus, UserGet, RoleGet): like administration, and for every caller
//     once Auth is enabled.
//
// All other calls get PERMISSION_DENIED. With Options.TrustLoopback, being on loopback counts as a credential while
// Auth is disabled, as in etcd; this is for test suites. Governing calls are recorded in the audit with the caller's
// address, also if they are refused.
//
// With Auth enabled a token of system:admin acts as the user root, so that a cloud's operator is not locked out by a
// lost password. Callers on loopback then need a token of Auth, as in etcd.
//
// A token of Auth is sent in the metadata "token", as clientv3 does. The metadata "authorization" may hold a cloud
// token or a token of Auth. A cloud token may also be sent as "token", as by `etcdctl --auth-jwt-token "$(cat
// admin.token)" member add …`. `etcdctl --user root:…` and `etcdctl --cert … --key …` present the other two
// credentials. The token of a stream is verified when the stream begins. Whether the token's user still has access is
// checked for each request on the stream. A stream that was admitted only because of a token of system:admin ends
// within about 2 s after that token becomes invalid or its user loses the role.
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

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/kv"
)

// Prefix is the prefix of the full names of all methods served by this package.
const Prefix = "/etcdserverpb."

// Options configures a Server. Fields are required unless their comment says otherwise.
type Options struct {
	Service *kv.Service
	// Members implements the service Cluster; if nil, the service Cluster is not offered.
	Members Members
	// StrictReconfig applies etcd's default rule to adding and removing members: enough members must have been in
	// contact with the leader for 5 s. Without StrictReconfig, only the contact at the time of the request is checked.
	StrictReconfig bool
	// Verifier verifies the cloud's bearer tokens; if nil, no cloud tokens are accepted.
	Verifier auth.Verifier
	// Open lets every caller read and write keys while etcd's Auth is disabled.
	Open bool
	// TrustLoopback lets callers on loopback call governing methods without a credential until Auth is enabled, as etcd
	// does. It is for test suites: any process of the host can then stop the cluster.
	TrustLoopback bool
	// CountWith is another server; optional. If it is set, the limits of open streams apply to the streams of both
	// servers together.
	CountWith *Server
	// Audit records governing calls; if nil, they are not recorded.
	Audit auth.Auditor
	// CommonName sets the user of calls without a token while etcd's Auth is enabled: it is the common name of the
	// client's certificate.
	CommonName bool
	// Dir is the directory for temporary snapshot files.
	Dir string
	Log *slog.Logger
}

// Server serves etcd's API on one or more ports.
type Server struct {
	opts          Options
	rechecker     *auth.Rechecker // verifies again the tokens of open streams
	leaderStreams streamSet
	openStreams   *openStreams
	watchStreams  *rpc.Streams // limits the bytes that the clients of watches have not read
	slow          slowLog
}

// New creates a server. The caller must run its Run method.
func New(opts Options) *Server {
	s := &Server{opts: opts, rechecker: auth.NewRechecker(opts.Verifier), openStreams: &openStreams{}, watchStreams: rpc.NewStreams(), slow: slowLog{log: opts.Log}}
	if opts.CountWith != nil {
		s.openStreams, s.watchStreams = opts.CountWith.openStreams, opts.CountWith.watchStreams
	}
	return s
}

// Streams returns the limiter of the server's watch streams. Each gRPC server on which the server is registered must
// use rpc.Codec and credentials that Streams().Credentials has wrapped.
func (s *Server) Streams() *rpc.Streams { return s.watchStreams }

// Run ends streams that require a leader while there is none, until ctx ends.
func (s *Server) Run(ctx context.Context) { s.leaderStreams.run(ctx, s.opts.Service) }

// Register registers the services on a gRPC server, which must use Unary and Stream as the interceptors of their
// methods.
func (s *Server) Register(g grpc.ServiceRegistrar) {
	pb.RegisterKVServer(g, &keys{Service: s.opts.Service})
	pb.RegisterWatchServer(g, &watches{service: s.opts.Service})
	pb.RegisterLeaseServer(g, &leases{Service: s.opts.Service})
	pb.RegisterAuthServer(g, &users{Service: s.opts.Service})
	pb.RegisterMaintenanceServer(g, &maintenance{Service: s.opts.Service, dir: s.opts.Dir})
	if s.opts.Members != nil {
		pb.RegisterClusterServer(g, &cluster{members: s.opts.Members, service: s.opts.Service, strict: s.opts.StrictReconfig})
	}
}

// Unary is the interceptor of all unary methods whose names begin with Prefix. It authorizes, audits and logs calls.
func (s *Server) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	begin := time.Now()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
		if err != nil {
			resp, err = nil, s.toStatus(ctx, info.FullMethod, err)
		}
		s.slow.record(ctx, info.FullMethod, req, resp, time.Since(begin), err)
	}()
	if s.opts.Service.IsLearner() && !servedByLearner(req) {
		return nil, rpctypes.ErrGRPCNotSupportedForLearner
	}
	if _, err := s.requiresLeader(ctx); err != nil {
		return nil, err
	}
	ctx, a := s.admit(ctx, info.FullMethod)
	if classOf(info.FullMethod) == governing {
		err = s.runAudited(ctx, info.FullMethod, req, a.err, func(ctx context.Context) error {
			resp, err = handler(ctx, req)
			return err
		})
		return resp, err
	}
	if a.err != nil {
		return nil, a.err
	}
	return handler(ctx, req)
}

// servedByLearner reports whether a learner may serve a unary request. As in etcd, a learner serves only Status and
// serializable ranges.
func servedByLearner(req any) bool {
	switch r := req.(type) {
	case *pb.StatusRequest:
		return true
	case *pb.RangeRequest:
		return r.Serializable
	}
	return false
}

// Stream is the interceptor of all streaming methods whose names begin with Prefix. It authorizes and audits streams.
func (s *Server) Stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	ctx := ss.Context()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
		if err != nil {
			err = s.toStatus(ctx, info.FullMethod, err)
		}
	}()
	if s.opts.Service.IsLearner() && info.FullMethod != pb.Maintenance_Snapshot_FullMethodName {
		return rpctypes.ErrGRPCNotSupportedForLearner
	}
	requiresLeader, err := s.requiresLeader(ctx)
	if err != nil {
		return err
	}
	admitted, a := s.admit(ctx, info.FullMethod)
	if classOf(info.FullMethod) == governing {
		return s.runAudited(admitted, info.FullMethod, nil, a.err, func(ctx context.Context) error {
			return s.runStream(ctx, a, requiresLeader, srv, ss, handler)
		})
	}
	if a.err != nil {
		return a.err
	}
	return s.runStream(admitted, a, requiresLeader, srv, ss, handler)
}

// runStream runs the handler of a stream. The parameters ctx and a are the results of admit. The stream is ended when
// its token becomes invalid. If requiresLeader is set, the stream is also ended when there is no leader. A watch stream
// is also ended if its client does not read while other streams need the memory.
func (s *Server) runStream(ctx context.Context, a *admission, requiresLeader bool, srv any, ss grpc.ServerStream, handler grpc.StreamHandler) error {
	ctx = s.opts.Service.Begin(ctx)
	user := s.opts.Service.Caller(ctx)
	closed, err := s.openStreams.acquire(ctx, user)
	if err != nil {
		return err
	}
	defer closed()
	ctx, done := s.withTokenChecks(ctx, a.token)
	defer done()
	if requiresLeader {
		led, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		defer s.leaderStreams.add(cancel)()
		ctx = led
	}
	if ctx != ss.Context() {
		ss = &stream{ss, ctx}
	}
	if a.method == pb.Watch_Watch_FullMethodName {
		bound, done := s.watchStreams.Bound(ss, clientOf(ctx, user), errSlowReader)
		defer done()
		ss = bound
	}
	err = handler(srv, ss)
	if cause := context.Cause(ss.Context()); err != nil && cause != nil {
		if _, ok := cause.(interface{ GRPCStatus() *status.Status }); ok {
			return cause
		}
	}
	return err
}

// stream is a gRPC stream whose context was replaced.
type stream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *stream) Context() context.Context { return s.ctx }

// requiresLeader reports whether the client requires that the group has a leader. It returns an error if the client
// requires a leader and there is none. It also returns an error if the client's API version is not valid UTF-8.
func (s *Server) requiresLeader(ctx context.Context) (bool, error) {
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

// toStatus returns errors with a gRPC status unchanged, and converts the errors of a canceled request. Other errors are
// internal: they are logged, and the client gets codes.Internal.
func (s *Server) toStatus(ctx context.Context, method string, err error) error {
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
		return st.Err() // gRPC's own status of a broken stream
	}
	s.opts.Log.Error("call failed", "method", method, "err", err)
	return status.Error(codes.Internal, "etcdserver: internal error")
}

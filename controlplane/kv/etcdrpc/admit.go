package etcdrpc

import (
	"context"
	"errors"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/loopback"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	etcdusers "github.com/trivet-cloud/trivet/controlplane/kv/users"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// class is a group of methods with the same rule for which callers may call them. The package comment describes the
// rules.
type class uint8

const (
	governing      class = iota // for callers with a credential, even on loopback; includes all unlisted methods
	administration              // for callers on loopback or with a credential
	data                        // methods that read and write keys, and Authenticate
	selfQuery                   // methods of Auth with which users query themselves
)

// classes maps methods to their class. It omits the methods of the services KV, Watch and Lease, which all have the
// class data. All other omitted methods of etcd's services have the class governing.
var classes = map[string]class{
	pb.Cluster_MemberList_FullMethodName:     administration,
	pb.Maintenance_Alarm_FullMethodName:      administration,
	pb.Maintenance_Status_FullMethodName:     administration,
	pb.Maintenance_Defragment_FullMethodName: administration,
	pb.Maintenance_Hash_FullMethodName:       administration,
	pb.Maintenance_HashKV_FullMethodName:     administration,
	pb.Auth_UserList_FullMethodName:          administration,
	pb.Auth_RoleList_FullMethodName:          administration,
	pb.Auth_Authenticate_FullMethodName:      data,
	pb.Auth_AuthStatus_FullMethodName:        selfQuery,
	pb.Auth_UserGet_FullMethodName:           selfQuery,
	pb.Auth_RoleGet_FullMethodName:           selfQuery,
}

func classOf(method string) class {
	name, ok := strings.CutPrefix(method, Prefix)
	if !ok {
		return administration // gRPC's own services, such as health
	}
	switch service, _, _ := strings.Cut(name, "/"); service {
	case "KV", "Watch", "Lease":
		return data
	}
	return classes[method]
}

// admission is the result of authorizing a call.
type admission struct {
	server *Server
	method string
	// token is the caller's cloud token if the call was admitted only because of that token. When the token becomes
	// invalid, the stream of the call is closed.
	token string
	// trusted is true if the caller is on loopback or presented a credential.
	trusted bool
	err     error
}

type admissionKey struct{}

// admit authorizes a call and returns the context for its handler. The context contains the result, so that a call is
// authorized only once, although admit is called twice: by the intake, before the message of a unary call is received,
// and by the interceptor afterwards. Receiving the message takes at most rpc.ReceiveTime. Changes of permissions during
// that time still take effect, because the Service checks the permissions of etcd's users when it executes a request.
func (s *Server) admit(ctx context.Context, method string) (context.Context, *admission) {
	if a, ok := ctx.Value(admissionKey{}).(*admission); ok && a.server == s && a.method == method {
		return ctx, a
	}
	a := &admission{server: s, method: method}
	if classOf(method) == governing {
		ctx, a.token, a.err = s.admitGoverning(ctx)
		a.trusted = a.err == nil
	} else {
		ctx, a.err = s.authorize(ctx, a)
	}
	return context.WithValue(ctx, admissionKey{}, a), a
}

// authorize authorizes a call of a non-governing method. It sets a.token and a.trusted. If a cloud token or a
// certificate determines the user of etcd's Auth, the returned context names that user.
func (s *Server) authorize(ctx context.Context, a *admission) (context.Context, error) {
	class := classOf(a.method)
	from, _ := peer.FromContext(ctx)
	enabled := s.opts.Service.AuthEnabled()
	local := onLoopback(from)
	if a.trusted = local; local && !enabled {
		return ctx, nil
	}
	operator, err := s.operator(ctx)
	if err != nil {
		return ctx, err
	}
	if enabled && operator != nil {
		a.token, a.trusted = cloudToken(ctx), true
		return kv.As(ctx, etcdusers.Root), nil
	}
	name, certified := certificateName(from)
	if enabled && s.usesCommonName(ctx, name, certified) {
		ctx = kv.As(ctx, name)
	}
	a.trusted = local || certified || operator != nil
	switch {
	case local, certified:
		return ctx, nil
	case class == data && (enabled || s.opts.Open), class == selfQuery && enabled:
		return ctx, nil
	case operator != nil:
		a.token = cloudToken(ctx)
		return ctx, nil
	case enabled:
		return ctx, toPermissionDenied(s.opts.Service.MustBeAdmin(ctx))
	}
	return ctx, rpctypes.ErrGRPCPermissionDenied
}

// admitGoverning authorizes a call of a governing method, which requires a credential. The returned context contains
// the caller, whom the audit records.
func (s *Server) admitGoverning(ctx context.Context) (_ context.Context, token string, err error) {
	from, _ := peer.FromContext(ctx)
	enabled := s.opts.Service.AuthEnabled()
	name, certified := certificateName(from)
	operator, err := s.operator(ctx)
	switch {
	case err != nil:
		return ctx, "", err
	case operator != nil:
		if enabled {
			ctx = kv.As(ctx, etcdusers.Root)
		}
		return withCaller(ctx, operator), cloudToken(ctx), nil
	case enabled:
		if s.usesCommonName(ctx, name, certified) {
			ctx = kv.As(ctx, name)
		}
		// RootUser returns an error if Auth was disabled after the check above. MustBeAdmin would then admit every
		// caller.
		user, err := s.opts.Service.RootUser(ctx)
		if err != nil && !certified && !onLoopback(from) {
			err = toPermissionDenied(err)
		}
		if user == "" {
			return ctx, "", err
		}
		return withCaller(ctx, &cloud.Caller{User: cloud.UserID("etcd:" + user), Proof: cloud.ProofPassword}), "", err
	case certified:
		return withCaller(ctx, &cloud.Caller{User: cloud.UserID("certificate:" + name), Proof: cloud.ProofMTLS}), "", nil
	case s.opts.TrustLoopback && onLoopback(from):
		return withCaller(ctx, &cloud.Caller{}), "", nil
	}
	return ctx, "", rpctypes.ErrGRPCPermissionDenied
}

// usesCommonName reports whether the call runs as the user with the given name, which is the common name of the
// client's certificate. This requires that Options.CommonName is set, that the certificate was verified, and that the
// call has no token.
func (s *Server) usesCommonName(ctx context.Context, name string, certified bool) bool {
	md, _ := metadata.FromIncomingContext(ctx)
	return s.opts.CommonName && certified && name != "" && len(md[rpctypes.TokenFieldNameGRPC])+len(md[rpctypes.TokenFieldNameSwagger]) == 0
}

// toPermissionDenied converts ErrGRPCUserEmpty and ErrGRPCUserNotFound to ErrGRPCPermissionDenied, so that every caller
// without admin rights gets the same error. Other errors are unchanged: after an error about an invalid token, clients
// request a new token.
func toPermissionDenied(err error) error {
	for _, hidden := range []error{rpctypes.ErrGRPCUserEmpty, rpctypes.ErrGRPCUserNotFound} {
		if errors.Is(err, hidden) {
			return rpctypes.ErrGRPCPermissionDenied
		}
	}
	return err
}

// operator returns the caller if the call has a cloud token with the role system:admin. It returns nil if the call has
// no cloud token, or one without that role. It returns ErrGRPCInvalidAuthToken if the token is invalid.
func (s *Server) operator(ctx context.Context) (*cloud.Caller, error) {
	token := cloudToken(ctx)
	if s.opts.Verifier == nil || token == "" {
		return nil, nil
	}
	caller, err := s.opts.Verifier.Verify(ctx, token)
	if err != nil {
		return nil, rpctypes.ErrGRPCInvalidAuthToken
	}
	if !governs(caller) {
		return nil, nil
	}
	return caller, nil
}

// cloudToken returns the cloud token in a call's metadata, or "" if there is none or it is a token of etcd's Auth.
// clientv3 and etcdctl --auth-jwt-token send a cloud token as the metadata "token".
func cloudToken(ctx context.Context) string {
	md, _ := metadata.FromIncomingContext(ctx)
	token := ""
	if header := md[rpctypes.TokenFieldNameSwagger]; len(header) > 0 {
		token, _ = auth.Bearer(header[0])
	} else if header := md[rpctypes.TokenFieldNameGRPC]; len(header) > 0 && strings.Count(header[0], ".") == 2 {
		token = header[0]
	}
	if etcdusers.IsToken(token) {
		return "" // a token of etcd's Auth, which is also accepted without the scheme Bearer
	}
	return token
}

func governs(c *cloud.Caller) bool { return c.Node == "" && c.Authenticated() && c.IsCloudAdmin() }

// withTokenChecks returns a context that is canceled when the token becomes invalid or its user loses the role
// system:admin. While the token cannot be verified, the context is not canceled: this happens on a member without a
// quorum, which has no new data to send. If token is empty, withTokenChecks returns ctx.
func (s *Server) withTokenChecks(ctx context.Context, token string) (context.Context, func()) {
	if token == "" {
		return ctx, func() {}
	}
	ctx, end := context.WithCancelCause(ctx)
	stop := s.rechecker.Subscribe(token, func(c *auth.Check) {
		if c.Err == nil && !governs(c.Caller) || fault.Is(c.Err, fault.Unauthenticated) {
			end(rpctypes.ErrGRPCInvalidAuthToken)
		}
	})
	return ctx, func() { stop(); end(nil) }
}

func onLoopback(p *peer.Peer) bool { return p != nil && loopback.Both(p.LocalAddr, p.Addr) }

// certificateName returns the common name of the client's certificate; ok is false without a verified certificate.
func certificateName(p *peer.Peer) (name string, ok bool) {
	if p == nil {
		return "", false
	}
	t, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(t.State.VerifiedChains) == 0 {
		return "", false
	}
	return t.State.VerifiedChains[0][0].Subject.CommonName, true
}

package etcdrpc

import (
	"context"
	"errors"
	"net"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/trivet-cloud/trivet/controlplane/auth"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	etcdusers "github.com/trivet-cloud/trivet/controlplane/kv/users"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// class is what a method is about.
type class uint8

const (
	administration class = iota // the cluster, and who may what; what is not listed is this
	data                        // keys, and proving who one is
	own                         // of Auth, what users may ask about themselves
)

// classes are the services and methods that are not administration.
var classes = map[string]class{
	pb.Auth_Authenticate_FullMethodName: data,
	pb.Auth_AuthStatus_FullMethodName:   own,
	pb.Auth_UserGet_FullMethodName:      own,
	pb.Auth_RoleGet_FullMethodName:      own,
}

func classOf(method string) class {
	rest := method[min(len(Prefix), len(method)):]
	switch service, _, _ := strings.Cut(rest, "/"); service {
	case "KV", "Watch", "Lease":
		return data
	}
	return classes[method]
}

// admit lets a call in, with the context to carry it out with, or says that it may not.
func (s *Server) admit(ctx context.Context, method string) (context.Context, error) {
	from, _ := peer.FromContext(ctx)
	enabled := s.opts.Service.AuthEnabled()
	local := from != nil && onLoopback(from.Addr)
	if local && !enabled {
		return ctx, nil
	}
	class := classOf(method)
	operator, err := s.operator(ctx)
	if err != nil {
		return ctx, err
	}
	name, certified := certificate(from)
	if enabled {
		switch md, _ := metadata.FromIncomingContext(ctx); {
		case operator:
			return kv.As(ctx, etcdusers.Root), nil
		case s.opts.CommonName && certified && name != "" && len(md[rpctypes.TokenFieldNameGRPC])+len(md[rpctypes.TokenFieldNameSwagger]) == 0:
			ctx = kv.As(ctx, name)
		}
	}
	switch {
	case local, certified, operator:
		return ctx, nil
	case class == data && (enabled || s.opts.Open), class == own && enabled:
		return ctx, nil
	case enabled:
		return ctx, denied(s.opts.Service.MustBeAdmin(ctx))
	}
	return ctx, rpctypes.ErrGRPCPermissionDenied
}

// denied is what whoever may not administrate is told, whether that is a user or nobody. Every other error stays as it is:
// of a token that is not valid any more clients get another one by themselves.
func denied(err error) error {
	for _, no := range []error{rpctypes.ErrGRPCUserEmpty, rpctypes.ErrGRPCUserNotFound} {
		if errors.Is(err, no) {
			return rpctypes.ErrGRPCPermissionDenied
		}
	}
	return err
}

// operator says whether the call shows a token of the cloud's administrator. One that is not valid fails.
func (s *Server) operator(ctx context.Context) (bool, error) {
	token := cloudToken(ctx)
	if s.opts.Verifier == nil || token == "" {
		return false, nil
	}
	governs, err := s.governs(ctx, token)
	if err != nil {
		return false, rpctypes.ErrGRPCInvalidAuthToken
	}
	return governs, nil
}

// cloudToken is the token of the cloud that a call shows; empty when it shows none, or one of Auth.
func cloudToken(ctx context.Context) string {
	md, _ := metadata.FromIncomingContext(ctx)
	header := md[rpctypes.TokenFieldNameSwagger]
	if len(header) == 0 {
		return ""
	}
	token, err := auth.Bearer(header[0])
	if err != nil || etcdusers.IsToken(token) {
		return "" // Auth's, which needs no scheme
	}
	return token
}

func (s *Server) governs(ctx context.Context, token string) (bool, error) {
	caller, err := s.opts.Verifier.Verify(ctx, token)
	return err == nil && caller.Node == "" && caller.Proven() && caller.Governs(), err
}

// recheck is how often the administrator's token of a stream is judged again.
const recheck = time.Second

// whileGoverning ends a stream that a token of the administrator opened when that token, or the role, does. What cannot be
// judged just now goes on: a member that is cut off has nothing new to tell.
func (s *Server) whileGoverning(ctx context.Context) (context.Context, func()) {
	token := cloudToken(ctx)
	if s.opts.Verifier == nil || token == "" {
		return ctx, func() {}
	}
	ctx, end := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		again := time.NewTicker(recheck)
		defer again.Stop()
		for {
			select {
			case <-again.C:
			case <-ctx.Done():
				return
			}
			if governs, err := s.governs(ctx, token); err == nil && !governs || fault.Is(err, fault.Unauthenticated) {
				end(rpctypes.ErrGRPCInvalidAuthToken)
				return
			}
		}
	}()
	return ctx, func() { end(nil); <-done }
}

func onLoopback(a net.Addr) bool {
	tcp, ok := a.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}

// certificate is the common name of the certificate that the client showed, if it showed one that was verified.
func certificate(p *peer.Peer) (name string, ok bool) {
	if p == nil {
		return "", false
	}
	t, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(t.State.VerifiedChains) == 0 {
		return "", false
	}
	return t.State.VerifiedChains[0][0].Subject.CommonName, true
}

package rpc

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"google.golang.org/grpc/credentials"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	reflectionv1alpha "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// openServices lists gRPC's own services, which every caller may use on a port with Options.Public.
var openServices = []string{
	healthv1.Health_ServiceDesc.ServiceName, reflectionv1.ServerReflection_ServiceDesc.ServiceName,
	reflectionv1alpha.ServerReflection_ServiceDesc.ServiceName,
}

type authenticatedKey struct{}

// authenticatedCaller returns the caller whose token verify has verified for this call, or nil.
func authenticatedCaller(ctx context.Context) *cloud.Caller {
	c, _ := ctx.Value(authenticatedKey{}).(*cloud.Caller)
	return c
}

// authenticate is the admit function of an Intake. It inspects the headers of a call and the client certificate of its
// connection, and returns the limits of the call, or an error if the call is refused.
func (e *edge) authenticate(ctx context.Context, method string) (context.Context, Admission, error) {
	if g := e.opts.Passthrough; g != nil && strings.HasPrefix(method, g.Prefix) {
		ctx, known, err := g.Admit(ctx, method)
		return ctx, Admission{Foreign: true, Proven: known, Limit: e.max(g.MaxMessage)}, err
	}
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	if auth.Open[auth.Method(method)] != "" || slices.Contains(e.opts.Open, method) || e.opts.Public && slices.Contains(openServices, service) {
		return ctx, Admission{Limit: MaxOpen}, nil
	}
	if e.opts.Certified {
		holder, err := certificateKey(ctx)
		return ctx, Admission{Proven: true, Holder: holder, Limit: e.max(MaxMessage), Most: true}, err
	}
	a := Admission{Proven: true, Limit: e.max(MaxPlain)}
	if method == uploadPart {
		a = Admission{Proven: true, Limit: e.max(MaxMessage), Most: true, Time: PartTime}
	}
	caller := auth.CallerOf(ctx) // set for a stream, because its interceptor runs first and verifies the token
	if caller == nil {
		var err error
		if ctx, err = e.verify(ctx); err != nil {
			return ctx, a, err
		}
		caller = authenticatedCaller(ctx)
	}
	if !caller.Authenticated() { // every caller can get an unauthenticated token, so it gives no larger limit
		return ctx, Admission{Limit: MaxOpen}, nil
	}
	a.Holder = holderOf(caller)
	return ctx, a, nil
}

// holderOf returns the key under which the caller's calls count for limits per holder of a credential. It is the
// caller's org, so that all users of an org share these limits, or the user if there is no org.
func holderOf(c *cloud.Caller) string {
	if org := cmp.Or(c.Scope.Org, c.Defaults.Org); org != "" {
		return "org " + string(org)
	}
	return "user " + string(c.User)
}

// max returns limit, or the server's own limit Options.MaxMessage if that is set and smaller.
func (e *edge) max(limit int) int {
	if e.opts.MaxMessage > 0 {
		return min(limit, e.opts.MaxMessage)
	}
	return limit
}

// verify verifies the bearer token of a call and returns a context with its holder.
func (e *edge) verify(ctx context.Context) (context.Context, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	var header string
	if h := md.Get("authorization"); len(h) > 0 {
		header = h[0]
	}
	token, err := auth.Bearer(header)
	if err != nil {
		return ctx, err
	}
	if e.opts.Verifier == nil {
		return ctx, fault.New(fault.Unauthenticated, "this port accepts no tokens")
	}
	caller, err := e.opts.Verifier.Verify(ctx, token)
	if err != nil {
		return ctx, err
	}
	return context.WithValue(ctx, authenticatedKey{}, caller), nil
}

// certificateKey returns a key for the client certificate of a call's connection, made from its public key. It returns
// Unauthenticated if there is no certificate. The TLS handshake has already verified the certificate.
func certificateKey(ctx context.Context) (holder string, err error) {
	if p, ok := peer.FromContext(ctx); ok {
		if t, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(t.State.PeerCertificates) > 0 {
			return "host " + string(t.State.PeerCertificates[0].RawSubjectPublicKeyInfo), nil
		}
	}
	return "", fault.New(fault.Unauthenticated, "this call needs the certificate of a host")
}

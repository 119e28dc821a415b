package rpc

import (
	"context"
	"slices"
	"strings"

	"google.golang.org/grpc/credentials"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	reflectionv1alpha "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"

	"github.com/trivet-cloud/trivet/controlplane/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// openServices lists gRPC's own services, which every caller may use on a public port.
var openServices = []string{
	healthv1.Health_ServiceDesc.ServiceName, reflectionv1.ServerReflection_ServiceDesc.ServiceName,
	reflectionv1alpha.ServerReflection_ServiceDesc.ServiceName,
}

type provenKey struct{}

// proven returns the caller that prove has verified, or nil.
func proven(ctx context.Context) *cloud.Caller {
	c, _ := ctx.Value(provenKey{}).(*cloud.Caller)
	return c
}

// prove admits a call by its headers and the certificate of its connection; see NewIntake.
func (e *edge) prove(ctx context.Context, method string) (context.Context, Admission, error) {
	if g := e.opts.Guest; g != nil && strings.HasPrefix(method, g.Prefix) {
		return ctx, Admission{Foreign: true, Limit: e.max(g.MaxMessage)}, g.Admit(ctx, method)
	}
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	if auth.Open[auth.Method(method)] != "" || slices.Contains(e.opts.Open, method) || e.opts.Public && slices.Contains(openServices, service) {
		return ctx, Admission{Limit: MaxOpen}, nil
	}
	if e.opts.Certified {
		return ctx, Admission{Proven: true, Limit: e.max(MaxMessage), Most: true}, certified(ctx)
	}
	a := Admission{Proven: true, Limit: e.max(MaxPlain)}
	if method == uploadPart {
		a = Admission{Proven: true, Limit: e.max(MaxMessage), Most: true, Time: PartTime}
	}
	if auth.CallerOf(ctx) != nil {
		return ctx, a, nil // a stream, whose interceptor has verified the token
	}
	ctx, err := e.verify(ctx)
	return ctx, a, err
}

// max returns the smaller of limit and the server's limit.
func (e *edge) max(limit int) int {
	if e.opts.MaxMessage > 0 {
		return min(limit, e.opts.MaxMessage)
	}
	return limit
}

// verify verifies the token of a call of a method that needs one.
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
		return ctx, fault.New(fault.Unauthenticated, "this port verifies no tokens")
	}
	caller, err := e.opts.Verifier.Verify(ctx, token)
	if err != nil {
		return ctx, err
	}
	return context.WithValue(ctx, provenKey{}, caller), nil
}

// certified refuses a call whose connection has no client certificate. The handshake has verified any certificate.
func certified(ctx context.Context) error {
	if p, ok := peer.FromContext(ctx); ok {
		if t, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(t.State.PeerCertificates) > 0 {
			return nil
		}
	}
	return fault.New(fault.Unauthenticated, "this call needs the certificate of a host")
}

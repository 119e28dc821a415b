// Package resttest contains what the tests of REST APIs share: callers with tokens, and a server for them.
package resttest

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Lost is a token that cannot be verified, because the members have no leader. Verify returns Unavailable for it.
const Lost = "lost"

// Callers verifies the tokens of tests. Its keys are the tokens, and its values the callers.
type Callers map[string]*cloud.Caller

// Verify returns a copy of the caller with the token, or Unauthenticated if there is none.
func (c Callers) Verify(_ context.Context, token string) (*cloud.Caller, error) {
	if token == Lost {
		return nil, fault.New(fault.Unavailable, "no leader").MayRetry()
	}
	if caller, ok := c[token]; ok {
		clone := *caller
		return &clone, nil
	}
	return nil, fault.New(fault.Unauthenticated, "the token is not valid")
}

// Bound returns a caller with these bindings, who has logged in with a password. The token is limited to scope unless
// scope is the zero value.
func Bound(user cloud.UserID, scope cloud.Tenant, bindings ...cloud.Binding) *cloud.Caller {
	return &cloud.Caller{User: user, Proof: cloud.ProofPassword, Scope: scope, Bindings: bindings}
}

// Role returns the binding of a role in a project.
func Role(r cloud.Role, t cloud.Tenant) cloud.Binding {
	return cloud.Binding{Role: r, Org: t.Org, Project: t.Project}
}

// Admin returns a system administrator without a project.
func Admin() *cloud.Caller {
	return &cloud.Caller{User: "admin", Proof: cloud.ProofHostKey, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}}
}

// NewServer returns a server without routes, which accepts the tokens of callers.
func NewServer(service fault.Service, name string, callers Callers) *rest.Server {
	return rest.New(rest.Options{
		Service: service, Name: name, Log: slog.New(slog.DiscardHandler),
		Metrics: rest.NewMetrics(prometheus.NewRegistry()), Verifier: callers,
	})
}

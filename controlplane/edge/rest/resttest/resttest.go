// Package resttest contains the common parts of the tests of REST APIs. Callers is a token verifier with fixed callers,
// and NewServer returns a REST server that uses it.
package resttest

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TokenWithoutLeader is a token for which Callers.Verify returns Unavailable, as a member without a leader does.
const TokenWithoutLeader = "lost"

// Callers is the token verifier of tests. Its keys are tokens, and its values are the callers with these tokens.
type Callers map[string]*cloud.Caller

// Verify returns a copy of the caller with the token, or Unauthenticated if no caller has the token.
func (c Callers) Verify(_ context.Context, token string) (*cloud.Caller, error) {
	if token == TokenWithoutLeader {
		return nil, fault.New(fault.Unavailable, "no leader").MayRetry()
	}
	if caller, ok := c[token]; ok {
		clone := *caller
		return &clone, nil
	}
	return nil, fault.New(fault.Unauthenticated, "the token is not valid")
}

// Bound returns a user with these role bindings, who has logged in with a password. The user's token is limited to
// scope. If scope is the zero value, the token is not limited.
func Bound(user cloud.UserID, scope cloud.Tenant, bindings ...cloud.Binding) *cloud.Caller {
	return &cloud.Caller{User: user, Proof: cloud.ProofPassword, Scope: scope, Bindings: bindings}
}

// Role returns the binding of a role in a project.
func Role(r cloud.Role, t cloud.Tenant) cloud.Binding {
	return cloud.Binding{Role: r, Org: t.Org, Project: t.Project}
}

// Admin returns a caller with the role system:admin and no other binding.
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

// Package auth authorizes calls. It is shared by all services and both edges.
//
// An edge (package rest or rpc) verifies a bearer token with a Verifier and puts the Caller into the context. Each
// handler then calls Admit once, before it reads any record. Admit resolves the tenant of the call (tenant.go),
// evaluates the policy (Cedar: policy.cedar, over the authorization table in rules.go), and sets the method and the
// tenant of the Caller for the audit. For open streams, Readmit and Rechecker (recheck.go) repeat the check.
//
// The package must not know records or transports.
package auth

import (
	"context"
	"slices"
	"strings"
	"sync"

	"google.golang.org/genproto/googleapis/rpc/code"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Verifier verifies bearer tokens.
type Verifier interface {
	Verify(ctx context.Context, token string) (*cloud.Caller, error)
}

// Edge is the protocol of a call. It matters only where the two differ.
type Edge uint8

const (
	RPC Edge = iota
	REST
)

type entry struct {
	caller *cloud.Caller
	edge   Edge
	let    *admission
}

// admission records the last successful authorization of a call, so that a repeated check of the same call is cheap.
type admission struct {
	mu     sync.Mutex
	method Method
	tenant cloud.Tenant
	// roles holds the caller's roles in tenant, for which the policy allowed the method.
	roles []cloud.Role
	// count is the function that was given to OnAdmit, or nil.
	count func(cloud.Tenant) error
}

// covers reports whether the policy has already allowed this caller to call method in tenant with these roles. A REST
// handler calls Admit before it reads the body, and again with the tenant in the body, which is usually the same.
func (a *admission) covers(method Method, tenant cloud.Tenant, roles []cloud.Role) bool {
	if a == nil {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.method == method && a.tenant == tenant && slices.Equal(a.roles, roles)
}

type key struct{}

// With returns a context for a call of the caller.
func With(ctx context.Context, caller *cloud.Caller, edge Edge) context.Context {
	return context.WithValue(ctx, key{}, entry{caller, edge, &admission{}})
}

// Without returns a context that belongs to no call.
func Without(ctx context.Context) context.Context { return context.WithValue(ctx, key{}, entry{}) }

// CallerOf returns the caller that an edge verified, or nil if the context has none.
func CallerOf(ctx context.Context) *cloud.Caller {
	e, _ := ctx.Value(key{}).(entry)
	return e.caller
}

// OnAdmit makes Admit call f with the tenant of the call before it admits the call. If f returns an error, Admit
// refuses the call with that error. ctx must come from With. f runs each time that the handler calls Admit.
func OnAdmit(ctx context.Context, f func(cloud.Tenant) error) {
	if e, _ := ctx.Value(key{}).(entry); e.let != nil {
		e.let.mu.Lock()
		e.let.count = f
		e.let.mu.Unlock()
	}
}

// Bearer returns the token in an Authorization header, or Unauthenticated if there is none.
func Bearer(header string) (string, error) {
	if header == "" {
		return "", fault.New(fault.Unauthenticated, "no token: send Authorization: Bearer <token>")
	}
	scheme, token, _ := strings.Cut(header, " ")
	token = strings.TrimSpace(token)
	if !strings.EqualFold(scheme, "Bearer") || token == "" {
		return "", fault.New(fault.Unauthenticated, "want Authorization: Bearer <token>")
	}
	return token, nil
}

// CheckIdempotencyKey returns InvalidArgument, naming field, if an idempotency key is malformed. An empty key is valid
// and means none.
func CheckIdempotencyKey(field, key string) error {
	if len(key) > cloud.MaxIdempotencyKey || strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r > '~' }) {
		return fault.Invalid(field, "must be at most %d bytes of printable ASCII", cloud.MaxIdempotencyKey)
	}
	return nil
}

// Admit authorizes a call and returns its tenant, or the fault with which the call is to be refused. org and project
// are the IDs in the request. If they are empty, the tenant is chosen by the call's metadata, the token's scope, and
// the defaults of the token's holder, in this order (tenant.go).
func Admit(ctx context.Context, method Method, org, project string) (cloud.Tenant, error) {
	rule, ok := rules[method]
	if !ok {
		return cloud.Tenant{}, fault.New(fault.PermissionDenied, "%s is not open to anybody", method)
	}
	e, _ := ctx.Value(key{}).(entry)
	if e.caller == nil {
		return cloud.Tenant{}, fault.New(fault.Unauthenticated, "no token: send Authorization: Bearer <token>")
	}
	c := e.caller
	c.Method = string(method)
	if c.Node != "" {
		return cloud.Tenant{}, fault.New(fault.PermissionDenied, "%s is not for hosts", method)
	}
	if !c.Authenticated() {
		return cloud.Tenant{}, fault.New(fault.PermissionDenied,
			"the token's holder proved nothing: ask for one with a registered name and its password")
	}
	tenant, err := resolve(ctx, c, rule, e.edge, cloud.Tenant{Org: cloud.OrgID(org), Project: cloud.ProjectID(project)})
	if err != nil {
		return cloud.Tenant{}, err
	}
	c.Tenant = tenant
	roles := rule.rolesAt(c, tenant)
	if !e.let.covers(method, tenant, roles) && !defaultPolicy.permits(c, method, tenant, roles) {
		return cloud.Tenant{}, refusal(c, method, rule, tenant)
	}
	if e.let != nil {
		e.let.mu.Lock()
		e.let.method, e.let.tenant, e.let.roles = method, tenant, roles
		count := e.let.count
		e.let.mu.Unlock()
		if count != nil {
			if err := count(tenant); err != nil {
				return cloud.Tenant{}, err
			}
		}
	}
	return tenant, nil
}

// Readmit returns nil if a call that was admitted would be admitted now, with the caller's present roles, and
// PermissionDenied otherwise. It returns nil for a call that was not admitted yet.
func Readmit(ctx context.Context, now *cloud.Caller) error {
	e, _ := ctx.Value(key{}).(entry)
	if e.let == nil {
		return nil
	}
	e.let.mu.Lock()
	method, tenant := e.let.method, e.let.tenant
	e.let.mu.Unlock()
	if method == "" {
		return nil
	}
	if rule := rules[method]; !defaultPolicy.permits(now, method, tenant, rule.rolesAt(now, tenant)) {
		return refusal(now, method, rule, tenant)
	}
	return nil
}

// Auditor records calls that write no record themselves.
type Auditor interface {
	Failed(c *cloud.Caller, outcome, message string)
	// Done records a call that succeeded and wrote no record.
	Done(c *cloud.Caller)
}

// ReportSuccess reports a call that succeeded to the auditor if its method writes no record.
func ReportSuccess(a Auditor, c *cloud.Caller, m Method) {
	if a != nil && c != nil && slices.Contains(unwritten, m) {
		a.Done(c)
	}
}

// ReportFailure reports a call that ended with a fault to the auditor: a refused call, or a failed call of a method
// that changes something. The caller may be nil.
func ReportFailure(a Auditor, c *cloud.Caller, m Method, f *fault.Fault, requestID, address string) {
	refused := f.Kind == fault.PermissionDenied || f.Kind == fault.Unauthenticated || f.Reason == noTenant
	if a == nil || m.Reads() && !refused {
		return
	}
	if c == nil {
		c = &cloud.Caller{RequestID: requestID, Address: address}
	}
	if c.Method == "" {
		c.Method = string(m)
	}
	a.Failed(c, code.Code(f.Kind.RPC()).String(), f.Message)
}

func refusal(c *cloud.Caller, method Method, rule Rule, tenant cloud.Tenant) error {
	needs := rule.Roles
	if rule.Scope == OfPlace || rule.Scope == OfProjectOrOrg && tenant.Project == "" {
		// A role in a project grants no rights in its org or in the whole cloud, and a role in an org none in the whole
		// cloud.
		needs = slices.DeleteFunc(slices.Clone(needs), func(r cloud.Role) bool {
			return tenant.Org == "" || tenant.Project == "" && strings.HasPrefix(string(r), "project:")
		})
	}
	if len(needs) == 0 {
		needs = []cloud.Role{cloud.SystemAdmin}
	}
	if rule.allows(c, tenant) {
		return fault.New(fault.PermissionDenied, "%s cannot call %s with the proof %s: the access it creates would outlive the credential", c.Name(), method.verb(), c.Proof)
	}
	f := fault.New(fault.PermissionDenied, "%s may not %s: it needs one of the roles %v", c.Name(), method.verb(), needs)
	if tenant != (cloud.Tenant{}) {
		f.Message += " in " + tenant.String()
	}
	return f
}

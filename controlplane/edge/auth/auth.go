// Package auth authorizes calls, for all services, over gRPC and over REST.
//
// Package rest or rpc verifies the bearer token of a call with a Verifier and puts the Caller into the context. The
// handler then calls Admit once, before it reads any record. Admit finds the tenant of the call (tenant.go), evaluates
// the policy (Cedar: policy.cedar, with the authorization table in rules.go), and sets the method and the tenant of the
// Caller for the audit. For open streams, Readmit and Rechecker (recheck.go) repeat the check.
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

// Verifier verifies bearer tokens. Verify returns the token's holder, or an error if the token is not valid.
type Verifier interface {
	Verify(ctx context.Context, token string) (*cloud.Caller, error)
}

// Edge is the protocol of a call. It affects how Admit finds the tenant of a call, and which error a missing tenant
// gets.
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

// admission holds the last successful authorization of a call, so that a repeated check of the same call is cheap.
type admission struct {
	mu     sync.Mutex
	method Method
	tenant cloud.Tenant
	// roles holds the roles of the caller in tenant with which the policy allowed the method.
	roles []cloud.Role
	// count is the function that OnAdmit registered, or nil. Admit calls it before it admits a call.
	count func(cloud.Tenant) error
}

// covers reports whether the last successful authorization was for the same method, tenant and roles. A REST handler
// calls Admit before it reads the body, and again with the tenant in the body, which is usually the same.
func (a *admission) covers(method Method, tenant cloud.Tenant, roles []cloud.Role) bool {
	if a == nil {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.method == method && a.tenant == tenant && slices.Equal(a.roles, roles)
}

type key struct{}

// With returns a context for a call by the given caller, over the given protocol.
func With(ctx context.Context, caller *cloud.Caller, edge Edge) context.Context {
	return context.WithValue(ctx, key{}, entry{caller, edge, &admission{}})
}

// Without returns a context without a caller, for background work that continues after a call.
func Without(ctx context.Context) context.Context { return context.WithValue(ctx, key{}, entry{}) }

// CallerOf returns the caller whose token the server has verified, or nil if the context has none.
func CallerOf(ctx context.Context) *cloud.Caller {
	e, _ := ctx.Value(key{}).(entry)
	return e.caller
}

type tokenKey struct{}

// WithToken returns a context with the bearer token of the call.
func WithToken(ctx context.Context, token string) context.Context {
	return context.WithValue(ctx, tokenKey{}, token)
}

// TokenOf returns the bearer token of the call, or "" if the call has none. It is for calls that let the caller continue
// later with the same rights. It must not be logged or stored in plain text.
func TokenOf(ctx context.Context) string {
	token, _ := ctx.Value(tokenKey{}).(string)
	return token
}

// OnAdmit registers the function f for the call of ctx, which must come from With. Each Admit of this call then calls f
// with the call's tenant. If f returns an error, Admit refuses the call with that error.
func OnAdmit(ctx context.Context, f func(cloud.Tenant) error) {
	if e, _ := ctx.Value(key{}).(entry); e.let != nil {
		e.let.mu.Lock()
		e.let.count = f
		e.let.mu.Unlock()
	}
}

// Bearer returns the token in the value of an Authorization header. It returns an Unauthenticated fault if there is
// none or the scheme is not Bearer.
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

// AdmitAll authorizes a call that lists the objects of all tenants. It returns the tenant to which the request limits
// the list; empty fields set no limit.
func AdmitAll(ctx context.Context, method Method, in interface {
	GetOrgId() string
	GetProjectId() string
}) (cloud.Tenant, error) {
	if _, err := Admit(ctx, method, "", ""); err != nil {
		return cloud.Tenant{}, err
	}
	return cloud.ParseTenant(in.GetOrgId(), in.GetProjectId())
}

// CheckIdempotencyKey returns an InvalidArgument fault for the request field with the given name if key is not a valid
// idempotency key. An empty key is valid and means that the caller gave none.
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
			"the token is unauthenticated: ask for one with a user ID and its password").WithReason(unauthenticatedToken)
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

// Readmit repeats the authorization of the call that Admit has admitted for ctx. The parameter now is the call's caller
// with the roles of the present. Readmit returns nil if the call would be admitted now, or if Admit has not admitted a
// call yet. Otherwise it returns a PermissionDenied fault.
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

// GuestCallFailed is the reason of faults whose message may quote the guest. The audit stores this constant instead of
// the message.
const GuestCallFailed = "GUEST_CALL_FAILED"

// Auditor creates audit records for failed calls, and for successful calls of the methods in the list unwritten. Such
// calls change no record. A call that changes a record creates its audit record together with the change.
type Auditor interface {
	Failed(c *cloud.Caller, outcome, message string)
	// Done creates the audit record of a call that succeeded but changed no record.
	Done(c *cloud.Caller)
}

// ReportSuccess passes a successful call to the auditor if its method is in the list unwritten, that is, if it acts
// without changing a record. Other methods create their audit records as part of their changes, or need none.
func ReportSuccess(a Auditor, c *cloud.Caller, m Method) {
	if a != nil && c != nil && slices.Contains(unwritten, m) {
		a.Done(c)
	}
}

// ReportFailure passes a call that ended with the fault f to the auditor, if the call was refused for lack of
// authorization or its method changes something. It does nothing if c.Recorded is set. c is nil if the caller is
// unknown.
func ReportFailure(a Auditor, c *cloud.Caller, m Method, f *fault.Fault, requestID, address string) {
	refused := f.Kind == fault.PermissionDenied || f.Kind == fault.Unauthenticated || f.Reason == noTenant
	if a == nil || m.Reads() && !refused || c != nil && c.Recorded {
		return
	}
	if c == nil {
		c = &cloud.Caller{RequestID: requestID, Address: address}
	}
	if c.Method == "" {
		c.Method = string(m)
	}
	message := f.Message
	if f.Reason == GuestCallFailed {
		// The message can quote an error text of the guest, which can repeat the secrets of the request.
		message = f.Reason
	}
	a.Failed(c, code.Code(f.Kind.RPC()).String(), message)
}

func refusal(c *cloud.Caller, method Method, rule Rule, tenant cloud.Tenant) error {
	needs := rule.Roles
	if rule.Scope == OfPlace || rule.Scope == OfProjectOrOrg && tenant.Project == "" {
		// Name only roles that would admit the call. A role in a project grants no rights in its org or in the entire
		// cloud, and a role in an org grants none in the entire cloud.
		needs = slices.DeleteFunc(slices.Clone(needs), func(r cloud.Role) bool {
			return tenant == (cloud.Tenant{}) || tenant.Project == "" && strings.HasPrefix(string(r), "project:")
		})
		if places := rule.places(c); tenant.Org == "" && len(places) > 0 {
			return errUnnamed(c, method, places)
		}
	}
	if len(needs) == 0 {
		needs = []cloud.Role{cloud.SystemAdmin}
	}
	if rule.allows(c, tenant) {
		return fault.New(fault.PermissionDenied, "%s cannot call %s with the proof %s: the access it creates would outlive the credential", c.Name(), method.verb(), c.Proof)
	}
	f := fault.New(fault.PermissionDenied, "%s may not %s: it needs one of the roles %v", c.Name(), method.verb(), needs)
	switch {
	case tenant.Org == "" && tenant.Project != "":
		f.Message += " in project " + string(tenant.Project)
	case tenant.Org != "":
		f.Message += " in " + tenant.String()
	}
	return f
}

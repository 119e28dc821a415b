// Package auth says who makes a call and whether they may: the half of authentication that all services share.
//
// An edge (rest, rpc) verifies a bearer token through a Verifier and puts the Caller into the context. Each handler then
// asks Admit, once, before it looks at anything else: Admit resolves the tenant (the order of precedence is in tenant.go)
// and asks the policy (Cedar: policy.cedar, over the one table of rules in rules.go), and notes on the Caller what was let
// in, for the audit. It knows no records and no transport.
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

// Verifier turns a bearer token into who holds it. A token that is not valid is Unauthenticated.
type Verifier interface {
	Verify(ctx context.Context, token string) (*cloud.Caller, error)
}

// Edge says over what a call came, where the two differ.
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

// admission is what a call was let in for, for whoever asks again while it goes on.
type admission struct {
	mu     sync.Mutex
	method Method
	tenant cloud.Tenant
	// roles are those of the caller in tenant that the policy allowed to call method.
	roles []cloud.Role
	// count is the function that was given to OnAdmit, or nil.
	count func(cloud.Tenant) error
}

// covers reports whether the policy has already allowed this caller to call method in tenant with these roles. A REST
// handler calls Admit before it reads the body and again with the tenant that the body names, which is mostly the same.
func (a *admission) covers(method Method, tenant cloud.Tenant, roles []cloud.Role) bool {
	if a == nil {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.method == method && a.tenant == tenant && slices.Equal(a.roles, roles)
}

type key struct{}

// With puts the caller of a call into its context.
func With(ctx context.Context, caller *cloud.Caller, edge Edge) context.Context {
	return context.WithValue(ctx, key{}, entry{caller, edge, &admission{}})
}

// Without is a context that belongs to no call.
func Without(ctx context.Context) context.Context { return context.WithValue(ctx, key{}, entry{}) }

// CallerOf is the caller that an edge verified; nil when none was.
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

// Bearer takes the token out of an Authorization header.
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

// CheckIdempotencyKey says whether a caller's key is one; empty is none.
func CheckIdempotencyKey(field, key string) error {
	if len(key) > cloud.MaxIdempotencyKey || strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r > '~' }) {
		return fault.Invalid(field, "must be at most %d bytes of printable ASCII", cloud.MaxIdempotencyKey)
	}
	return nil
}

// Admit lets the call in or says why not, and resolves whose resources it is about. org and project are what the
// request names; empty leaves the choice to the metadata of the call, the token, and the defaults of its holder.
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
	if !c.Proven() {
		return cloud.Tenant{}, fault.New(fault.PermissionDenied,
			"the token's holder proved nothing: ask for one with a registered name and its password")
	}
	tenant, err := resolve(ctx, c, rule, e.edge, cloud.Tenant{Org: cloud.OrgID(org), Project: cloud.ProjectID(project)})
	if err != nil {
		return cloud.Tenant{}, err
	}
	c.Tenant = tenant
	roles := rule.rolesAt(c, tenant)
	if !e.let.covers(method, tenant, roles) && !court.permitted(c, method, tenant, roles) {
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

// Again says whether a call that was let in would be let in now, by who its caller has become. What was not let in yet is
// not judged.
func Again(ctx context.Context, now *cloud.Caller) error {
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
	if rule := rules[method]; !court.permitted(now, method, tenant, rule.rolesAt(now, tenant)) {
		return refusal(now, method, rule, tenant)
	}
	return nil
}

// Auditor is told of calls that were refused, and of those that were to change something and failed.
type Auditor interface {
	Failed(c *cloud.Caller, outcome, message string)
	// Done is told of calls that were carried out and wrote no record.
	Done(c *cloud.Caller)
}

// Carried tells an auditor of a call that was carried out, if nothing else has.
func Carried(a Auditor, c *cloud.Caller, m Method) {
	if a != nil && c != nil && slices.Contains(unwritten, m) {
		a.Done(c)
	}
}

// Report tells an auditor of a call that ended with a fault, if that is worth a record. The caller may be nil.
func Report(a Auditor, c *cloud.Caller, m Method, f *fault.Fault, requestID, address string) {
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
		// What rules a part does not rule the whole.
		needs = slices.DeleteFunc(slices.Clone(needs), func(r cloud.Role) bool {
			return tenant.Org == "" || tenant.Project == "" && strings.HasPrefix(string(r), "project:")
		})
	}
	if len(needs) == 0 {
		needs = []cloud.Role{cloud.SystemAdmin}
	}
	if rule.allows(c, tenant) {
		return fault.New(fault.PermissionDenied, "%s may not %s by the proof of %s: what it gives would outlive that", c.Name(), method.verb(), c.Proof)
	}
	f := fault.New(fault.PermissionDenied, "%s may not %s: it needs one of the roles %v", c.Name(), method.verb(), needs)
	if tenant != (cloud.Tenant{}) {
		f.Message += " in " + tenant.String()
	}
	return f
}

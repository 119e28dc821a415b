// Package auth says who makes a call and whether they may: the half of authentication that all services share.
//
// An edge (rest, rpc) verifies a bearer token through a Verifier and puts the Caller into the context. Each handler then
// asks Admit, once, before it looks at anything else: Admit resolves the tenant (the tenant rule of the identity design)
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
	"github.com/trivet-cloud/trivet/shared/mutant"
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
	// count is OnAdmit's; nil when there is none.
	count func(cloud.Tenant) error
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

// OnAdmit makes Admit call f with the tenant for which it is about to admit the call of ctx; an error of f refuses the
// call. ctx must come from With. f is called again when the handler calls Admit again.
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
// request names; empty means the token's.
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
	tenant, err := resolve(c, rule, e.edge, cloud.Tenant{Org: cloud.OrgID(org), Project: cloud.ProjectID(project)})
	if err != nil {
		return cloud.Tenant{}, err
	}
	c.Tenant = tenant
	if !court.permitted(c, method, tenant, rule.rolesAt(c, tenant)) {
		return cloud.Tenant{}, refusal(c, method, rule, tenant)
	}
	if e.let != nil {
		e.let.mu.Lock()
		e.let.method, e.let.tenant = method, tenant
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
	if a == nil || m.Reads() && f.Kind != fault.PermissionDenied && f.Kind != fault.Unauthenticated {
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

// resolve finds the tenant of a call; see part 1, "Tenant rule", of the identity design.
func resolve(c *cloud.Caller, rule Rule, edge Edge, asked cloud.Tenant) (cloud.Tenant, error) {
	switch rule.Scope {
	case Nowhere:
		if c.Scope != (cloud.Tenant{}) && !slices.Contains(rule.Roles, anyProven[0]) {
			return cloud.Tenant{}, fault.New(fault.PermissionDenied, "the token acts in %s only: ask for one without org_id and project_id", c.Scope)
		}
		return cloud.Tenant{}, nil
	case OfOrg:
		asked.Project = ""
	case OfPlace:
		return place(c.Scope, asked)
	case OfProjectOrOrg:
		if asked.Org != "" && asked.Project == "" {
			return place(c.Scope, asked)
		}
		rule.Scope = OfNamedProject
	}
	scope := c.Scope
	switch {
	case scope.Project != "" && scope.Org == "":
		// The verifier takes the org away from a project that is not that org's.
		return cloud.Tenant{}, fault.New(fault.PermissionDenied,
			"the token acts in project %s, which is not there: ask for one with another project_id", scope.Project)
	case scope.Project != "":
	case c.Has(cloud.SystemAdmin, cloud.Tenant{}), rule.biller(c):
		return adminTenant(rule, edge, scope, asked)
	default:
		only := onlyProject
		if rule.Scope == OfOrg {
			only = onlyOrg
		}
		var err error
		if scope, err = only(c, scope); err != nil {
			return cloud.Tenant{}, err
		}
	}
	if rule.Scope == OfOrg {
		scope.Project = ""
	}
	if asked.Org != "" && asked.Org != scope.Org || asked.Project != "" && asked.Project != scope.Project {
		if mutant.On(mutant.ForeignTenant) {
			return scope, nil
		}
		if asked.Org == "" {
			asked.Org = scope.Org
		}
		return cloud.Tenant{}, fault.New(fault.PermissionDenied, "the token acts in %s, not in %s", scope, asked)
	}
	return scope, nil
}

// place is what the request names, if the token reaches there.
func place(scope, asked cloud.Tenant) (cloud.Tenant, error) {
	if scope.Project != "" && asked != scope || scope.Org != "" && asked.Org != scope.Org {
		where := asked.String()
		if where == "" {
			where = "the cloud"
		}
		return cloud.Tenant{}, fault.New(fault.PermissionDenied, "the token acts in %s only, not in %s", scope, where)
	}
	return asked, nil
}

// biller reports whether the caller may do this in every project for the role of billing:admin.
func (r Rule) biller(c *cloud.Caller) bool {
	return r.Scope == OfNamedProject && slices.Contains(r.Roles, cloud.BillingAdmin) && c.Has(cloud.BillingAdmin, cloud.Tenant{})
}

// adminTenant is what system:admin, or billing:admin where that counts, names with a token that has no project.
func adminTenant(rule Rule, edge Edge, scope, asked cloud.Tenant) (cloud.Tenant, error) {
	if scope.Org != "" && asked.Org == "" {
		asked.Org = scope.Org
	}
	if scope.Org != "" && asked.Org != scope.Org {
		return cloud.Tenant{}, fault.New(fault.PermissionDenied, "the token acts in org %s, not in %s", scope.Org, asked.Org)
	}
	if edge == REST && rule.Scope == OfProject {
		return cloud.Tenant{}, fault.New(fault.PermissionDenied,
			"system:admin acts for a project here: ask for a token with org_id and project_id")
	}
	if asked.Org == "" && rule.Scope != OfNamedProject {
		return cloud.Tenant{}, fault.Invalid("org_id", "is required of system:admin")
	}
	if asked.Project == "" && rule.Scope != OfOrg {
		return cloud.Tenant{}, fault.Invalid("project_id", "is required of whoever acts in every project")
	}
	return asked, nil
}

// onlyProject is the one project that a caller without a project scope is bound in.
func onlyProject(c *cloud.Caller, within cloud.Tenant) (cloud.Tenant, error) {
	return only(c, "project", func(b cloud.Binding) (cloud.Tenant, bool) {
		return cloud.Tenant{Org: b.Org, Project: b.Project}, b.Project != "" && (within.Org == "" || within.Org == b.Org)
	})
}

// onlyOrg is the org of the token, or the one that a caller without a scope is bound in, whatever the projects.
func onlyOrg(c *cloud.Caller, within cloud.Tenant) (cloud.Tenant, error) {
	if within.Org != "" {
		return within, nil
	}
	return only(c, "org", func(b cloud.Binding) (cloud.Tenant, bool) { return cloud.Tenant{Org: b.Org}, b.Org != "" })
}

// only is the one place that the caller's bindings stand for.
func only(c *cloud.Caller, what string, place func(cloud.Binding) (cloud.Tenant, bool)) (cloud.Tenant, error) {
	var found []cloud.Tenant
	for _, b := range c.Bindings {
		if t, ok := place(b); ok && !slices.Contains(found, t) {
			found = append(found, t)
		}
	}
	switch len(found) {
	case 0:
		return cloud.Tenant{}, fault.New(fault.PermissionDenied, "%s has no role in any %s", c.Name(), what)
	case 1:
		return found[0], nil
	}
	names := make([]string, len(found))
	for i, t := range found {
		names[i] = t.String()
	}
	slices.Sort(names)
	return cloud.Tenant{}, fault.New(fault.PermissionDenied,
		"%s has roles in several %ss: ask for a token with the %s_id of one of %s", c.Name(), what, what, strings.Join(names, ", "))
}

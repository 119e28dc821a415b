// Package auth says who makes a call and whether they may: the half of authentication that all services share.
//
// An edge (rest, rpc) verifies a bearer token through a Verifier and puts the Caller into the context. Each handler then
// asks Admit, once, before it looks at anything else: Admit resolves the tenant (the tenant rule of the identity design)
// and checks the static table of rules. It knows no records and no transport.
package auth

import (
	"context"
	"slices"
	"strings"

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
}

type key struct{}

// With puts the caller of a call into its context.
func With(ctx context.Context, caller *cloud.Caller, edge Edge) context.Context {
	return context.WithValue(ctx, key{}, entry{caller, edge})
}

// CallerOf is the caller that an edge verified; nil when none was.
func CallerOf(ctx context.Context) *cloud.Caller {
	e, _ := ctx.Value(key{}).(entry)
	return e.caller
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
	if c.Node != "" {
		return cloud.Tenant{}, fault.New(fault.PermissionDenied, "%s is not for hosts", method)
	}
	if c.Proof == cloud.ProofNone || c.Proof == "" {
		return cloud.Tenant{}, fault.New(fault.PermissionDenied,
			"the token's holder proved nothing: ask for one with a registered name and its password")
	}
	tenant, err := resolve(c, rule, e.edge, cloud.Tenant{Org: cloud.OrgID(org), Project: cloud.ProjectID(project)})
	if err != nil {
		return cloud.Tenant{}, err
	}
	if !rule.allows(c, tenant) {
		return cloud.Tenant{}, refusal(c, method, rule, tenant)
	}
	return tenant, nil
}

func refusal(c *cloud.Caller, method Method, rule Rule, tenant cloud.Tenant) error {
	f := fault.New(fault.PermissionDenied, "%s may not %s: it needs one of the roles %v", c.Name(), method.verb(), rule.Roles)
	if tenant != (cloud.Tenant{}) {
		f.Message += " in " + tenant.String()
	}
	return f
}

// resolve finds the tenant of a call; see part 1, "Tenant rule", of the identity design.
func resolve(c *cloud.Caller, rule Rule, edge Edge, asked cloud.Tenant) (cloud.Tenant, error) {
	switch rule.Scope {
	case Nowhere:
		return cloud.Tenant{}, nil
	case OfOrg:
		asked.Project = ""
	}
	scope := c.Scope
	if scope.Project == "" {
		if c.Has(cloud.SystemAdmin, cloud.Tenant{}) {
			return adminTenant(rule, edge, scope, asked)
		}
		var err error
		if scope, err = onlyProject(c, scope); err != nil {
			return cloud.Tenant{}, err
		}
	}
	if rule.Scope == OfOrg {
		scope.Project = ""
	}
	if asked.Org != "" && asked.Org != scope.Org || asked.Project != "" && asked.Project != scope.Project {
		return cloud.Tenant{}, fault.New(fault.PermissionDenied, "the token acts in %s, not in %s", scope, asked)
	}
	return scope, nil
}

// adminTenant is what system:admin names with a token that has no project.
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
	if asked.Org == "" {
		return cloud.Tenant{}, fault.Invalid("org_id", "is required of system:admin")
	}
	if rule.Scope == OfProject && asked.Project == "" {
		return cloud.Tenant{}, fault.Invalid("project_id", "is required of system:admin")
	}
	return asked, nil
}

// onlyProject is the one project that a caller without a project scope is bound in.
func onlyProject(c *cloud.Caller, within cloud.Tenant) (cloud.Tenant, error) {
	var found []cloud.Tenant
	for _, b := range c.Bindings {
		t := cloud.Tenant{Org: b.Org, Project: b.Project}
		if b.Project != "" && (within.Org == "" || within.Org == b.Org) && !slices.Contains(found, t) {
			found = append(found, t)
		}
	}
	switch len(found) {
	case 0:
		return cloud.Tenant{}, fault.New(fault.PermissionDenied, "%s has no role in any project", c.Name())
	case 1:
		return found[0], nil
	}
	names := make([]string, len(found))
	for i, t := range found {
		names[i] = t.String()
	}
	slices.Sort(names)
	return cloud.Tenant{}, fault.New(fault.PermissionDenied,
		"%s has roles in several projects: ask for a token with the project_id of one of %s", c.Name(), strings.Join(names, ", "))
}

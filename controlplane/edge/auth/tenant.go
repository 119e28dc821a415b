package auth

import (
	"context"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// This file resolves the tenant of a call, which is named, in order of precedence, by
//
//   - org_id and project_id of the request;
//   - the metadata trivet-org and trivet-project, on REST the headers Trivet-Org and Trivet-Project;
//   - the scope of the token. A token with a scope acts only there: a call that names another tenant is refused;
//   - the defaults of the token's holder: the first org and the first project in which the holder got a role.
//
// A call that names a tenant in which the caller has no role gets the same error as one that names a tenant that does
// not exist: NOT_FOUND, on REST 403 (part 5.4 of the wire contract). Methods with the scope Nowhere or OfPlace ignore
// the metadata. Otherwise the metadata could turn a request about the entire cloud into one about an org.

// Projects looks up the org of a project. Admit needs it for calls that name a project without its org.
type Projects interface {
	// OrgOf returns the ID of the org that a project belongs to, or "" if the project does not exist.
	OrgOf(ctx context.Context, id cloud.ProjectID) (cloud.OrgID, error)
}

type projectsKey struct{}

// WithProjects returns a context in which Admit looks up the orgs of projects with v. It returns ctx itself if v does
// not implement Projects.
func WithProjects(ctx context.Context, v Verifier) context.Context {
	if p, ok := v.(Projects); ok {
		return context.WithValue(ctx, projectsKey{}, p)
	}
	return ctx
}

// Chosen returns the tenant that a call's metadata names. orgs and projects are the values of the two metadata keys;
// orgKey and projectKey are the names of those keys, for error messages. A key with more than one value is an error.
func Chosen(orgKey string, orgs []string, projectKey string, projects []string) (cloud.Tenant, error) {
	one := func(key string, values []string) (string, error) {
		switch {
		case len(values) > 1:
			return "", fault.Invalid(key, "is given %d times; want it once", len(values))
		case len(values) == 0 || values[0] == "":
			return "", nil
		}
		return values[0], cloud.CheckCallerID(key, values[0])
	}
	org, err := one(orgKey, orgs)
	if err != nil {
		return cloud.Tenant{}, err
	}
	project, err := one(projectKey, projects)
	return cloud.Tenant{Org: cloud.OrgID(org), Project: cloud.ProjectID(project)}, err
}

// Machine-readable reasons (google.rpc.ErrorInfo) of the errors of Admit:
const (
	// noTenant means that the tenant does not exist, or that the caller has no role in it.
	noTenant = "TENANT_NOT_FOUND"
	// TenantRequired means that the call names no tenant and the caller has no default. The call may be admitted if it
	// names a project or an org.
	TenantRequired = "TENANT_REQUIRED"
	// unauthenticatedToken means that the holder of the token did not prove its identity.
	unauthenticatedToken = "UNAUTHENTICATED_TOKEN"
	// TokenScope means that the call names a tenant outside the scope of the token.
	TokenScope = "TOKEN_SCOPE"
)

// Undecided reports whether Admit returned err only because the call names no tenant. A handler whose request body
// names the tenant may then read the body and call Admit again.
func Undecided(err error) bool {
	f, ok := fault.From(err)
	return ok && f.Reason == TenantRequired
}

// resolution holds the parameters that determine the tenant of one call, except the tenant that the request names.
type resolution struct {
	ctx  context.Context
	c    *cloud.Caller
	rule Rule
	edge Edge
}

func resolve(ctx context.Context, c *cloud.Caller, rule Rule, edge Edge, asked cloud.Tenant) (cloud.Tenant, error) {
	switch rule.Scope {
	case Nowhere:
		if c.Scope != (cloud.Tenant{}) && !slices.Contains(rule.Roles, anyProven[0]) {
			if !rule.allows(c, cloud.Tenant{}) {
				return cloud.Tenant{}, refusal(c, Method(c.Method), rule, cloud.Tenant{})
			}
			return cloud.Tenant{}, errOutsideScope("the token is limited to %s: ask for one without org_id and project_id", c.Scope)
		}
		return cloud.Tenant{}, nil
	case OfPlace:
		return place(c, rule, asked)
	case OfProjectOrOrg:
		if asked.Org != "" && asked.Project == "" {
			return place(c, rule, asked)
		}
		rule.Scope = OfNamedProject
	}
	r := resolution{ctx, c, rule, edge}
	asked = withChosen(asked, c.Chosen)
	if c.Scope.Project != "" {
		return r.resolveNarrowed(asked)
	}
	if scope := c.Scope; scope.Org != "" {
		if !c.HasRoleIn(scope) {
			return r.errNoAccess(scope)
		}
		if asked.Org != "" && asked.Org != scope.Org {
			return cloud.Tenant{}, errOutsideScope("the token is limited to org %s and cannot be used for %s", scope.Org, asked)
		}
		asked.Org = scope.Org
	}
	switch {
	case c.Has(cloud.SystemAdmin, cloud.Tenant{}), rule.isBiller(c):
		return r.resolveAny(asked)
	case rule.Scope == OfOrg:
		return r.resolveOrg(asked)
	}
	return r.resolveProject(asked)
}

// withChosen returns the tenant in a request (asked), with missing parts taken from the tenant in the call's metadata
// (chosen). If the two contradict each other, it returns asked unchanged.
func withChosen(asked, chosen cloud.Tenant) cloud.Tenant {
	if asked.Org != "" && chosen.Org != "" && asked.Org != chosen.Org || asked.Project != "" && asked.Project != chosen.Project {
		return asked
	}
	if asked.Org == "" {
		asked.Org = chosen.Org
	}
	asked.Project = chosen.Project
	return asked
}

// place determines the tenant of a method of the scope OfPlace. It returns the tenant in the request (asked), or an
// error if that tenant is outside the token's scope. For a request about the whole cloud, the error is about the scope
// only if a token without a scope would be admitted.
func place(c *cloud.Caller, rule Rule, asked cloud.Tenant) (cloud.Tenant, error) {
	scope := c.Scope
	if (scope.Project == "" || asked == scope) && (scope.Org == "" || asked.Org == scope.Org) {
		return asked, nil
	}
	if asked == (cloud.Tenant{}) && !rule.allows(c, asked) {
		return cloud.Tenant{}, refusal(c, Method(c.Method), rule, asked)
	}
	where := asked.String()
	if where == "" {
		where = "the cloud"
	}
	return cloud.Tenant{}, errOutsideScope("the token is limited to %s and cannot be used for %s", scope, where)
}

// places returns the orgs and projects in which the roles of the caller c suffice for a method of the scope OfPlace. It
// considers only roles within the scope of the caller's token.
func (r Rule) places(c *cloud.Caller) (all []cloud.Tenant) {
	inProjects := slices.ContainsFunc(r.Roles, func(role cloud.Role) bool { return strings.HasPrefix(string(role), "project:") })
	candidates := []cloud.Tenant{c.Scope}
	if c.Scope.Project == "" {
		candidates = nil
		for _, b := range c.Bindings {
			if c.Scope.Org == "" || b.Org == c.Scope.Org {
				candidates = append(candidates, b.Tenant())
			}
		}
	}
	for _, t := range candidates {
		if t.Org != "" && (t.Project == "" || inProjects) && r.allows(c, t) && !slices.Contains(all, t) {
			all = append(all, t)
		}
	}
	return all
}

// errUnnamed returns the error for a call of a method of the scope OfPlace that names no org, by a caller whose roles
// suffice in the given orgs and projects, of which there is at least one.
func errUnnamed(c *cloud.Caller, method Method, places []cloud.Tenant) error {
	name := "the org with org_id " + places[0].String()
	if t := places[0]; t.Project != "" {
		name = "the project with org_id " + string(t.Org) + " and project_id " + string(t.Project)
	}
	if len(places) > 1 {
		names, fields := make([]string, len(places)), "org_id"
		for i, t := range places {
			names[i] = t.String()
			if t.Project != "" {
				fields = "org_id and project_id"
			}
		}
		slices.Sort(names)
		name = "one of " + strings.Join(names, ", ") + " with " + fields
	}
	return fault.New(fault.PermissionDenied, "%s may not %s in the whole cloud: name %s", c.Name(), method.verb(), name).WithReason(TenantRequired)
}

// resolveNarrowed returns the tenant of a call whose token is limited to one project: that project or, for a method
// about an org, its org.
func (r resolution) resolveNarrowed(asked cloud.Tenant) (cloud.Tenant, error) {
	scope := r.c.Scope
	// The verifier of the token clears the org of the scope in three cases: the project does not exist, it is in
	// another org, or the token's holder has no role in it.
	if scope.Org == "" || !r.c.HasRoleIn(scope) {
		return r.errNoAccess(scope)
	}
	mismatch := asked.Org != "" && asked.Org != scope.Org || asked.Project != "" && asked.Project != scope.Project
	if mismatch && !mutant.On(mutant.ForeignTenant) {
		if asked.Org == "" {
			asked.Org = scope.Org
		}
		return cloud.Tenant{}, errOutsideScope("the token is limited to %s and cannot be used for %s", scope, asked)
	}
	if r.rule.Scope == OfOrg {
		scope.Project = ""
	}
	return scope, nil
}

// isBiller reports whether the caller may call the method in every project because of the role billing:admin. This is
// possible only for methods whose request names the project.
func (r Rule) isBiller(c *cloud.Caller) bool {
	return r.Scope == OfNamedProject && slices.Contains(r.Roles, cloud.BillingAdmin) && c.Has(cloud.BillingAdmin, cloud.Tenant{})
}

// resolveAny returns the tenant of a call whose caller may act in every tenant. The caller has the role system:admin,
// or has billing:admin and Rule.isBiller is true.
func (r resolution) resolveAny(asked cloud.Tenant) (cloud.Tenant, error) {
	lookUp := r.rule.Scope == OfProject && asked.Project != "" || r.rule.Scope == OfOrg && asked.Org == "" && asked.Project != ""
	if p, ok := r.ctx.Value(projectsKey{}).(Projects); ok && lookUp {
		org, err := orgOf(r.ctx, p, asked.Project)
		if err != nil {
			return cloud.Tenant{}, err
		}
		if org == "" || asked.Org != "" && asked.Org != org {
			return r.errNoAccess(asked)
		}
		asked.Org = org
	}
	if r.rule.Scope == OfOrg {
		asked.Project = ""
	}
	switch {
	case r.edge == REST && r.rule.Scope == OfProject && asked.Project == "":
		return cloud.Tenant{}, fault.New(fault.PermissionDenied,
			"this endpoint acts for one project, and system:admin is not limited to one: ask for a token with org_id and project_id, or send the header Trivet-Project").
			WithReason(TenantRequired)
	case r.edge == REST && r.rule.Scope == OfOrg && asked.Org == "":
		return cloud.Tenant{}, fault.New(fault.PermissionDenied,
			"this endpoint acts for one org, and system:admin is not limited to one: name it as org_id, or send the header Trivet-Org").
			WithReason(TenantRequired)
	case asked.Org == "" && r.rule.Scope != OfNamedProject:
		return cloud.Tenant{}, fault.Invalid("org_id", "is required: your role is not limited to one org")
	case asked.Project == "" && r.rule.Scope != OfOrg:
		return cloud.Tenant{}, fault.Invalid("project_id", "is required: your role is not limited to one project")
	}
	return asked, nil
}

// resolveOrg returns the tenant of a call of a method about an org (OfOrg).
func (r resolution) resolveOrg(asked cloud.Tenant) (cloud.Tenant, error) {
	if asked.Org == "" && asked.Project != "" {
		t, err := r.resolveNamed(asked)
		return cloud.Tenant{Org: t.Org}, err
	}
	if asked.Org != "" {
		if !r.c.HasRoleIn(cloud.Tenant{Org: asked.Org}) {
			return r.errNoAccess(cloud.Tenant{Org: asked.Org})
		}
		return cloud.Tenant{Org: asked.Org}, nil
	}
	found := cloud.OrgsOf(r.c.Bindings)
	if org, ok := cloud.Prefer(found, r.c.Defaults.Org); ok {
		return cloud.Tenant{Org: org}, nil
	}
	if len(found) == 0 {
		return cloud.Tenant{}, fault.New(fault.PermissionDenied, "%s has no role in any org", r.c.Name())
	}
	var names []string
	for _, o := range found {
		names = append(names, string(o))
	}
	return r.errAmbiguous("org", names)
}

// resolveProject returns the tenant of a call of a method about a project (OfProject, OfNamedProject).
func (r resolution) resolveProject(asked cloud.Tenant) (cloud.Tenant, error) {
	if asked.Project != "" {
		return r.resolveNamed(asked)
	}
	if asked.Org != "" && !r.c.HasRoleIn(asked) {
		return r.errNoAccess(asked)
	}
	found := cloud.ProjectsOf(r.c.Bindings, asked.Org)
	preferred := r.c.Defaults.Project
	if asked.Org != "" {
		preferred = cloud.Tenant{Org: asked.Org, Project: r.c.Defaults.ProjectIn(asked.Org)}
	}
	if t, ok := cloud.Prefer(found, preferred); ok {
		return t, nil
	}
	if len(found) > 0 {
		var names []string
		for _, t := range found {
			names = append(names, t.String())
		}
		return r.errAmbiguous("project", names)
	}
	if orgs := r.wholeOrgs(asked.Org); len(orgs) > 0 {
		return cloud.Tenant{}, fault.New(fault.PermissionDenied,
			"%s has no role in any project: set project_id, or the metadata trivet-project, to a project of org %s", r.c.Name(), strings.Join(orgs, ", ")).
			WithReason(TenantRequired)
	}
	return cloud.Tenant{}, fault.New(fault.PermissionDenied, "%s has no role in any project", r.c.Name())
}

// errAmbiguous returns the error for a call that names no tenant, by a caller with roles in several. names lists these
// orgs or projects; the parameter what is "org" or "project".
func (r resolution) errAmbiguous(what string, names []string) (cloud.Tenant, error) {
	slices.Sort(names)
	return cloud.Tenant{}, fault.New(fault.PermissionDenied,
		"%[1]s has roles in several %[2]ss: set %[2]s_id, or the metadata trivet-%[2]s, to one of %[3]s", r.c.Name(), what, strings.Join(names, ", ")).
		WithReason(TenantRequired)
}

// resolveNamed returns the project that the call names, if the caller has a role in the project or in its entire org.
func (r resolution) resolveNamed(asked cloud.Tenant) (cloud.Tenant, error) {
	for _, b := range r.c.Bindings {
		if b.Project == asked.Project && (asked.Org == "" || b.Org == asked.Org) {
			return cloud.Tenant{Org: b.Org, Project: b.Project}, nil
		}
	}
	p, ok := r.ctx.Value(projectsKey{}).(Projects)
	if !ok || len(r.wholeOrgs(asked.Org)) == 0 {
		return r.errNoAccess(asked)
	}
	org, err := orgOf(r.ctx, p, asked.Project)
	if err != nil {
		return cloud.Tenant{}, err
	}
	if org == "" || !slices.Contains(r.wholeOrgs(asked.Org), string(org)) {
		return r.errNoAccess(asked)
	}
	return cloud.Tenant{Org: org, Project: asked.Project}, nil
}

// orgOf looks up the org of a project that a request names. It returns InvalidArgument if the ID is malformed.
func orgOf(ctx context.Context, p Projects, id cloud.ProjectID) (cloud.OrgID, error) {
	if err := cloud.CheckCallerID("project_id", string(id)); err != nil {
		return "", err
	}
	return p.OrgOf(ctx, id)
}

// wholeOrgs returns the orgs in which the caller has a role that is not limited to one project. If the parameter org is
// not empty, the result contains no other org.
func (r resolution) wholeOrgs(org cloud.OrgID) (found []string) {
	for _, b := range r.c.Bindings {
		if b.Org != "" && b.Project == "" && (org == "" || b.Org == org) && !slices.Contains(found, string(b.Org)) {
			found = append(found, string(b.Org))
		}
	}
	return found
}

// errNoAccess returns the error for a tenant in which the caller has no role. A tenant that does not exist gets the
// same error, so that callers cannot learn which tenants exist.
func (r resolution) errNoAccess(t cloud.Tenant) (cloud.Tenant, error) {
	kind := fault.NotFound
	if r.edge == REST {
		kind = fault.PermissionDenied
	}
	what, id := "project", string(t.Project)
	if id == "" {
		what, id = "org", string(t.Org)
	}
	return cloud.Tenant{}, fault.New(kind, "no %s %s: it does not exist, or %s has no role in it", what, id, r.c.Name()).WithReason(noTenant)
}

// errOutsideScope returns the PermissionDenied error for a call that names a tenant outside the scope of its token.
func errOutsideScope(format string, args ...any) error {
	return fault.New(fault.PermissionDenied, format, args...).WithReason(TokenScope)
}

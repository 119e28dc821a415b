package auth

import (
	"context"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// This file resolves the tenant of a call. In order of precedence it is named by
//
//   - org_id and project_id of the request;
//   - the metadata trivet-org and trivet-project, on REST the headers Trivet-Org and Trivet-Project;
//   - the scope of the token. A token with a scope acts only there: a call that names another tenant is refused;
//   - the defaults of the token's holder: the first org and the first project that they were given a role in.
//
// A tenant that the caller has no role in is answered like one that does not exist: NOT_FOUND, on REST 403 (part 5.4 of
// the wire contract). Methods of the cloud itself, and those whose request names a place (OfPlace), take nothing from the
// metadata: a role that is given for the whole cloud must not pass for one in the org that the metadata names.

// Projects looks up projects that a call chooses by their IDs alone.
type Projects interface {
	// OrgOf returns the org of a project; empty when there is no such project.
	OrgOf(ctx context.Context, id cloud.ProjectID) (cloud.OrgID, error)
}

type projectsKey struct{}

// WithProjects lets Admit look up projects with v, if it can.
func WithProjects(ctx context.Context, v Verifier) context.Context {
	if p, ok := v.(Projects); ok {
		return context.WithValue(ctx, projectsKey{}, p)
	}
	return ctx
}

// Chosen returns the tenant that the metadata of a call names, given the values of its two keys and their names for
// messages.
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

// Reasons of refusals, for programs.
const (
	// noTenant is the reason for a tenant that is not there or that the caller has no role in.
	noTenant = "TENANT_NOT_FOUND"
	// TenantRequired is the reason of a refusal that naming a project, or an org, may turn into an admission.
	TenantRequired = "TENANT_REQUIRED"
	// TokenScope is the reason of a refusal because of the scope of the token.
	TokenScope = "TOKEN_SCOPE"
)

// Undecided reports whether Admit refused a call only because it names no tenant. A handler that reads the tenant from the
// body may read on and ask Admit again.
func Undecided(err error) bool {
	f, ok := fault.From(err)
	return ok && f.Reason == TenantRequired
}

// resolution is the search for the tenant of one call.
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
			return cloud.Tenant{}, outside("the token acts in %s only: ask for one without org_id and project_id", c.Scope)
		}
		return cloud.Tenant{}, nil
	case OfPlace:
		return place(c.Scope, asked)
	case OfProjectOrOrg:
		if asked.Org != "" && asked.Project == "" {
			return place(c.Scope, asked)
		}
		rule.Scope = OfNamedProject
	}
	r := resolution{ctx, c, rule, edge}
	asked = withChosen(asked, c.Chosen)
	if c.Scope.Project != "" {
		return r.narrowed(asked)
	}
	if scope := c.Scope; scope.Org != "" {
		if !c.Reaches(scope) {
			return r.none(scope)
		}
		if asked.Org != "" && asked.Org != scope.Org {
			return cloud.Tenant{}, outside("the token acts in org %s, not in %s", scope.Org, asked)
		}
		asked.Org = scope.Org
	}
	switch {
	case c.Has(cloud.SystemAdmin, cloud.Tenant{}), rule.biller(c):
		return r.any(asked)
	case rule.Scope == OfOrg:
		return r.org(asked)
	}
	return r.project(asked)
}

// withChosen completes what a request names with what the metadata of the call names, as far as they are about the same.
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

// place is the tenant that a request for a place names, if the token reaches there.
func place(scope, asked cloud.Tenant) (cloud.Tenant, error) {
	if scope.Project != "" && asked != scope || scope.Org != "" && asked.Org != scope.Org {
		where := asked.String()
		if where == "" {
			where = "the cloud"
		}
		return cloud.Tenant{}, outside("the token acts in %s only, not in %s", scope, where)
	}
	return asked, nil
}

// narrowed is the project of the token.
func (r resolution) narrowed(asked cloud.Tenant) (cloud.Tenant, error) {
	scope := r.c.Scope
	// The verifier takes the org away from a project that is not there, not that org's, or that the holder has no role in.
	if scope.Org == "" || !r.c.Reaches(scope) {
		return r.none(scope)
	}
	mismatch := asked.Org != "" && asked.Org != scope.Org || asked.Project != "" && asked.Project != scope.Project
	if mismatch && !mutant.On(mutant.ForeignTenant) {
		if asked.Org == "" {
			asked.Org = scope.Org
		}
		return cloud.Tenant{}, outside("the token acts in %s, not in %s", scope, asked)
	}
	if r.rule.Scope == OfOrg {
		scope.Project = ""
	}
	return scope, nil
}

// biller reports whether the caller may do this in every project for the role of billing:admin.
func (r Rule) biller(c *cloud.Caller) bool {
	return r.Scope == OfNamedProject && slices.Contains(r.Roles, cloud.BillingAdmin) && c.Has(cloud.BillingAdmin, cloud.Tenant{})
}

// any is the tenant of a call by system:admin, or by billing:admin where that counts, which may act in all of them.
func (r resolution) any(asked cloud.Tenant) (cloud.Tenant, error) {
	lookUp := r.rule.Scope == OfProject && asked.Project != "" || r.rule.Scope == OfOrg && asked.Org == "" && asked.Project != ""
	if p, ok := r.ctx.Value(projectsKey{}).(Projects); ok && lookUp {
		org, err := orgOf(r.ctx, p, asked.Project)
		if err != nil {
			return cloud.Tenant{}, err
		}
		if org == "" || asked.Org != "" && asked.Org != org {
			return r.none(asked)
		}
		asked.Org = org
	}
	if r.rule.Scope == OfOrg {
		asked.Project = ""
	}
	switch {
	case r.edge == REST && r.rule.Scope == OfProject && asked.Project == "":
		return cloud.Tenant{}, fault.New(fault.PermissionDenied,
			"system:admin acts for a project here: ask for a token with org_id and project_id, or send the header Trivet-Project").
			WithReason(TenantRequired)
	case asked.Org == "" && r.rule.Scope != OfNamedProject:
		return cloud.Tenant{}, fault.Invalid("org_id", "is required: your role is not limited to one org")
	case asked.Project == "" && r.rule.Scope != OfOrg:
		return cloud.Tenant{}, fault.Invalid("project_id", "is required: your role is not limited to one project")
	}
	return asked, nil
}

// org is the org of a call about what belongs to orgs.
func (r resolution) org(asked cloud.Tenant) (cloud.Tenant, error) {
	if asked.Org == "" && asked.Project != "" {
		t, err := r.named(asked)
		return cloud.Tenant{Org: t.Org}, err
	}
	if asked.Org != "" {
		if !r.c.Reaches(cloud.Tenant{Org: asked.Org}) {
			return r.none(cloud.Tenant{Org: asked.Org})
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
	return r.several("org", names)
}

// project is the project of a call about what belongs to projects.
func (r resolution) project(asked cloud.Tenant) (cloud.Tenant, error) {
	if asked.Project != "" {
		return r.named(asked)
	}
	if asked.Org != "" && !r.c.Reaches(asked) {
		return r.none(asked)
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
		return r.several("project", names)
	}
	if orgs := r.wholeOrgs(asked.Org); len(orgs) > 0 {
		return cloud.Tenant{}, fault.New(fault.PermissionDenied,
			"%s has no role in any project: name a project of org %s by project_id or the metadata trivet-project", r.c.Name(), strings.Join(orgs, ", ")).
			WithReason(TenantRequired)
	}
	return cloud.Tenant{}, fault.New(fault.PermissionDenied, "%s has no role in any project", r.c.Name())
}

// several refuses a call that could be about each of these.
func (r resolution) several(what string, names []string) (cloud.Tenant, error) {
	slices.Sort(names)
	return cloud.Tenant{}, fault.New(fault.PermissionDenied,
		"%[1]s has roles in several %[2]ss: name by %[2]s_id or the metadata trivet-%[2]s one of %[3]s", r.c.Name(), what, strings.Join(names, ", ")).
		WithReason(TenantRequired)
}

// named is the project that the call names, if the caller has a role there: in the project, or in all of its org.
func (r resolution) named(asked cloud.Tenant) (cloud.Tenant, error) {
	for _, b := range r.c.Bindings {
		if b.Project == asked.Project && (asked.Org == "" || b.Org == asked.Org) {
			return cloud.Tenant{Org: b.Org, Project: b.Project}, nil
		}
	}
	p, ok := r.ctx.Value(projectsKey{}).(Projects)
	if !ok || len(r.wholeOrgs(asked.Org)) == 0 {
		return r.none(asked)
	}
	org, err := orgOf(r.ctx, p, asked.Project)
	if err != nil {
		return cloud.Tenant{}, err
	}
	if org == "" || !slices.Contains(r.wholeOrgs(asked.Org), string(org)) {
		return r.none(asked)
	}
	return cloud.Tenant{Org: org, Project: asked.Project}, nil
}

// orgOf looks up the org of a project that a request names.
func orgOf(ctx context.Context, p Projects, id cloud.ProjectID) (cloud.OrgID, error) {
	if err := cloud.CheckCallerID("project_id", string(id)); err != nil {
		return "", err
	}
	return p.OrgOf(ctx, id)
}

// wholeOrgs are the orgs that the caller has a role in all of: one of them, or all when that is empty.
func (r resolution) wholeOrgs(org cloud.OrgID) (found []string) {
	for _, b := range r.c.Bindings {
		if b.Org != "" && b.Project == "" && (org == "" || b.Org == org) && !slices.Contains(found, string(b.Org)) {
			found = append(found, string(b.Org))
		}
	}
	return found
}

// none refuses a tenant that is not there and one that the caller has no role in, in the same words.
func (r resolution) none(t cloud.Tenant) (cloud.Tenant, error) {
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

// outside refuses a call beyond the scope of its token.
func outside(format string, args ...any) error {
	return fault.New(fault.PermissionDenied, format, args...).WithReason(TokenScope)
}

package main

import (
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// row has the request for an endpoint and the expected outcomes that do not follow from its class and rule.
type row struct {
	// name is endpoint.row.
	name string
	// path is the HTTP path, and body the request as JSON. $name is replaced by the ID of a resource of project web,
	// $no-name by an ID that does not exist, $new by a new name, and $uuid by a random UUID.
	path, body string
	// allowed is the outcome for authorized callers.
	allowed string
	// otherTenant is the outcome for callers who may call the endpoint in another tenant, and who name a resource of
	// project web but no tenant. Empty means allowed.
	otherTenant string
	// tokenScope is the scope of tokens for this endpoint: org, or empty for a project.
	tokenScope string
	// etcdAuth is what etcd's Auth requires of the caller: "nothing", "no token" (a call with an unknown token is refused),
	// or empty: a user of Auth.
	etcdAuth string
	// drain is set for streams of which the server allows one at a time.
	drain bool
	// cleanup, if set, is called after each call.
	cleanup func(h *testMember)
	// exceptions are outcomes for some columns that differ from the rule.
	exceptions []exception
	// order is the position of the row. Endpoints are called in this order.
	order int
}

// exception is the outcome of an endpoint for some columns, with the reason.
type exception struct {
	// columns lists names of columns, or "no certificate".
	columns []string
	answer  string
	why     string
}

// scope returns the scope of tokens for this row, for a caller with a role in project.
func (r row) scope(project cloud.Tenant) cloud.Tenant {
	if r.tokenScope == "org" {
		project.Project = ""
	}
	return project
}

// The outcomes of refused calls, over gRPC (false) and REST (true). They are part of the wire contract.
var (
	unauthenticated = map[bool]string{false: "UNAUTHENTICATED", true: "401 UNAUTHENTICATED"}
	denied          = map[bool]string{false: "PERMISSION_DENIED", true: "403 FORBIDDEN"}
)

// noTenant is the outcome of a gRPC call in a tenant that does not exist, or in which the caller has no role. It differs
// from the outcome for a resource that does not exist in the tenant.
const noTenant = "NOT_FOUND of the tenant"

// expected returns the only correct outcome of a cell. It implements the rules of authentication and tenancy independently of
// package auth.
func expected(e endpoint, r row, c column) string {
	for _, x := range r.exceptions {
		if slices.Contains(x.columns, c.name) {
			return x.answer
		}
	}
	isREST := e.method != ""
	switch e.class {
	case open:
		// gRPC verifies tokens even where none is required. The pages that an etcd serves beside its API do not.
		if c.kind == invalidToken && !isREST && e.listener.name != "etcd" {
			return unauthenticated[false]
		}
		return r.allowed
	case etcd:
		return expectedOfEtcd(r, c)
	case ruled:
		return expectedByRule(auth.Rules()[e.ruleMethod], isREST, r, c)
	}
	return "no class"
}

func expectedOfEtcd(r row, c column) string {
	switch {
	case c.kind == invalidToken:
		return unauthenticated[false]
	case r.etcdAuth == "nothing", c.kind == cloudAdmin, c.kind == cloudAdminNamingNone, c.kind == noToken && r.etcdAuth == "no token":
		return r.allowed
	case c.kind == noToken:
		return "INVALID_ARGUMENT" // etcdserver: user name is empty
	}
	// Other tokens of the cloud are not tokens of etcd's Auth.
	return unauthenticated[false]
}

func expectedByRule(rule auth.Rule, isREST bool, r row, c column) string {
	allowed := c.user.role == cloud.SystemAdmin || slices.Contains(rule.Roles, c.user.role) || slices.Contains(rule.Roles, auth.AnyProven)
	switch c.kind {
	case noToken, invalidToken:
		return unauthenticated[isREST]
	case unprovenToken:
		return denied[isREST]
	case provenWithoutRole, roleHere:
		// The outcome for a tenant in which the caller has no role is that for a tenant that does not exist. Over REST both are
		// 403.
		if c.kind == provenWithoutRole && !isREST && rule.Scope != auth.Nowhere && rule.Scope != auth.OfPlace {
			return noTenant
		}
		// These tokens are scoped to a project or an org. Methods about the cloud need a token that is scoped to the cloud.
		if !allowed || rule.Scope == auth.Nowhere && !slices.Contains(rule.Roles, auth.AnyProven) {
			return denied[isREST]
		}
		return r.allowed
	case cloudAdmin, cloudAdminNamingNone:
		return expectedOfAdmin(rule.Scope, isREST, r, c.kind == cloudAdmin)
	}
	// The caller has a role in another tenant.
	sameOrg := c.user.at.Org == web.Org
	switch {
	case !allowed:
		return denied[isREST]
	case rule.Scope == auth.Nowhere, rule.Scope == auth.OfOrg && sameOrg:
		return r.allowed
	case rule.Scope == auth.OfPlace, c.kind == otherTenant && namesTenant(r), strings.Contains(r.path, "$project"):
		return denied[isREST]
	case r.otherTenant != "":
		return r.otherTenant
	}
	return r.allowed
}

// expectedOfAdmin returns the outcome for the administrator whose token is scoped to the cloud. naming reports whether the
// request names a project if it can.
func expectedOfAdmin(scope auth.Scope, isREST bool, r row, naming bool) string {
	switch {
	case scope == auth.Nowhere, scope == auth.OfPlace, strings.Contains(r.path, "$project"):
		return r.allowed
	case isREST && (scope == auth.OfProject && !naming || !namesTenant(r)):
		return denied[true]
	case naming:
		return r.allowed
	case isREST:
		return "400 INVALID_ARGUMENT"
	}
	return "INVALID_ARGUMENT"
}

// namesTenant reports whether a request names the tenant that it is about.
func namesTenant(r row) bool {
	return strings.Contains(r.body, `_id":"$org"`) || strings.Contains(r.body, `_id":"$project"`)
}

package main

import (
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// row is what the table must know of an endpoint beside its class and its rule.
type row struct {
	// name is the endpoint's.
	name string
	// path of HTTP; ask is the request as JSON. $name stands for a thing of project web, $no-name for what is not there,
	// $new for a new name, $uuid for any id.
	path, body string
	// right is what whoever may call it is answered.
	allowed string
	// own, when set, is what those are answered who may call it for another tenant and ask for what is project web's
	// without naming that. Empty is right.
	otherTenant string
	// at is the scope of tokens: a project unless it says org.
	tokenScope string
	// asks is what etcd's Auth asks of the caller, unless that is to be a user: nothing, or no token that it does not know.
	etcdAuth string
	// drain is set for a stream of which the server has one at a time.
	drain bool
	// then, when set, is done after each call.
	cleanup func(h *testMember)
	// but are the columns in which it is otherwise, and why.
	exceptions []exception
	// order is that in which rows stand.
	order int
}

// exception is the answer that some kinds of tokens get from one endpoint.
type exception struct {
	// columns are names of columns, or "no certificate".
	columns []string
	answer  string
	why     string
}

// scope is that of a token for this row, of somebody whose role is in a project.
func (r row) scope(project cloud.Tenant) cloud.Tenant {
	if r.tokenScope == "org" {
		project.Project = ""
	}
	return project
}

// The two refusals, as gRPC and as every REST service of ours says them (the spec's part 7.3).
var (
	unauthenticated = map[bool]string{false: "UNAUTHENTICATED", true: "401 UNAUTHENTICATED"}
	denied          = map[bool]string{false: "PERMISSION_DENIED", true: "403 FORBIDDEN"}
)

// noTenant is the outcome of a gRPC call in a tenant that does not exist for its caller. It tells it from one about
// something in the tenant that does not exist.
const noTenant = "NOT_FOUND of the tenant"

// expected is the one right outcome of a cell. It is written from the design (part 1 of identity and credit: proof,
// tenant rule), not from package auth.
func expected(e endpoint, r row, c column) string {
	for _, x := range r.exceptions {
		if slices.Contains(x.columns, c.name) {
			return x.answer
		}
	}
	isREST := e.method != ""
	switch e.class {
	case open:
		// gRPC judges a token that is shown, also where none is asked for. What an etcd serves beside its API does not.
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
	// Other tokens of the cloud make nobody a user of etcd: they are not tokens of its Auth.
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
		// A tenant in which the holder has no role is answered like one that does not exist; REST says 403 of both.
		if c.kind == provenWithoutRole && !isREST && rule.Scope != auth.Nowhere && rule.Scope != auth.OfPlace {
			return noTenant
		}
		// These tokens are for a project or an org. What belongs to the cloud asks for one that is for all of it.
		if !allowed || rule.Scope == auth.Nowhere && !slices.Contains(rule.Roles, auth.AnyProven) {
			return denied[isREST]
		}
		return r.allowed
	case cloudAdmin, cloudAdminNamingNone:
		return expectedOfAdmin(rule.Scope, isREST, r, c.kind == cloudAdmin)
	}
	// Of another tenant.
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

// expectedOfAdmin is for the administrator whose token is of no project: who names one, where a request can.
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

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
	path, ask string
	// right is what whoever may call it is answered.
	right string
	// own, when set, is what those are answered who may call it for another tenant and ask for what is project web's
	// without naming that. Empty is right.
	own string
	// at is the scope of tokens: a project unless it says org.
	at string
	// asks is what etcd's Auth asks of the caller, unless that is to be a user: nothing, or no token that it does not know.
	asks string
	// drain is set for a stream of which the server has one at a time.
	drain bool
	// then, when set, is done after each call.
	then func(h *house)
	// but are the columns in which it is otherwise, and why.
	but []exception
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
	if r.at == "org" {
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
	for _, x := range r.but {
		if slices.Contains(x.columns, c.name) {
			return x.answer
		}
	}
	isREST := e.method != ""
	switch e.class {
	case open:
		// gRPC judges a token that is shown, also where none is asked for. What an etcd serves beside its API does not.
		if c.nature == bad && !isREST && e.door.name != "etcd" {
			return unauthenticated[false]
		}
		return r.right
	case etcd:
		return expectedOfEtcd(r, c)
	case ruled:
		return expectedByRule(auth.Rules()[e.as], isREST, r, c)
	}
	return "no class"
}

func expectedOfEtcd(r row, c column) string {
	switch {
	case c.nature == bad:
		return unauthenticated[false]
	case r.asks == "nothing", c.nature == roaming, c.nature == mute, c.nature == absent && r.asks == "no token":
		return r.right
	case c.nature == absent:
		return "INVALID_ARGUMENT" // etcdserver: user name is empty
	}
	// Other tokens of the cloud make nobody a user of etcd: they are not tokens of its Auth.
	return unauthenticated[false]
}

func expectedByRule(rule auth.Rule, isREST bool, r row, c column) string {
	allowed := c.who.role == cloud.SystemAdmin || slices.Contains(rule.Roles, c.who.role) || slices.Contains(rule.Roles, auth.AnyProven)
	switch c.nature {
	case absent, bad:
		return unauthenticated[isREST]
	case unproven:
		return denied[isREST]
	case proven, role:
		// A tenant in which the holder has no role is answered like one that does not exist; REST says 403 of both.
		if c.nature == proven && !isREST && rule.Scope != auth.Nowhere && rule.Scope != auth.OfPlace {
			return noTenant
		}
		// These tokens are for a project or an org. What belongs to the cloud asks for one that is for all of it.
		if !allowed || rule.Scope == auth.Nowhere && !slices.Contains(rule.Roles, auth.AnyProven) {
			return denied[isREST]
		}
		return r.right
	case roaming, mute:
		return expectedOfAdmin(rule.Scope, isREST, r, c.nature == roaming)
	}
	// Of another tenant.
	sameOrg := c.who.at.Org == web.Org
	switch {
	case !allowed:
		return denied[isREST]
	case rule.Scope == auth.Nowhere, rule.Scope == auth.OfOrg && sameOrg:
		return r.right
	case rule.Scope == auth.OfPlace, c.nature == elsewhere && names(r), strings.Contains(r.path, "$project"):
		return denied[isREST]
	case r.own != "":
		return r.own
	}
	return r.right
}

// expectedOfAdmin is for the administrator whose token is of no project: who names one, where a request can.
func expectedOfAdmin(scope auth.Scope, isREST bool, r row, naming bool) string {
	switch {
	case scope == auth.Nowhere, scope == auth.OfPlace, strings.Contains(r.path, "$project"):
		return r.right
	case isREST && (scope == auth.OfProject && !naming || !names(r)):
		return denied[true]
	case naming:
		return r.right
	case isREST:
		return "400 INVALID_ARGUMENT"
	}
	return "INVALID_ARGUMENT"
}

// names reports whether a request names the tenant that it is about.
func names(r row) bool {
	return strings.Contains(r.ask, `_id":"$org"`) || strings.Contains(r.ask, `_id":"$project"`)
}

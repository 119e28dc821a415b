package main

import (
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// row has the request for an endpoint and the expected outcomes that do not follow from its authorized callers.
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
	// drain is set for streams of which the server allows one at a time.
	drain bool
	// cleanup, if set, is called after each call.
	cleanup func(h *testMember)
	// exceptions are outcomes for some columns that differ from what authorizedCallers implies.
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

// expected returns the only correct outcome of a cell. It follows from the file of authorized callers and from the rules
// of authentication and tenancy, which it implements independently of package auth.
func expected(e endpoint, r row, c column) string {
	for _, x := range r.exceptions {
		if slices.Contains(x.columns, c.name) {
			return x.answer
		}
	}
	isREST := e.method != ""
	switch {
	case e.access.allows(callerEtcdUser):
		return expectedOfEtcd(e.access, r, c)
	case e.access.byRole():
		return expectedByRole(e.access, isREST, r, c)
	case c.kind == invalidToken && !isREST && (e.listener.name != "etcd" || strings.HasPrefix(e.name, etcdrpc.Prefix)):
		// gRPC verifies tokens even where none is required. The services of gRPC itself on etcd's ports do not.
		return unauthenticated[false]
	case e.access.allows(callerEverybody):
		return r.allowed
	case e.access.allows(callerNobody):
		return denied[isREST]
	}
	return "no callers"
}

func expectedOfEtcd(a access, r row, c column) string {
	switch {
	case c.kind == cloudAdmin, c.kind == cloudAdminNamingNone, c.kind == noToken && a.allows(callerAnonymous):
		return r.allowed
	case c.kind == noToken:
		return "INVALID_ARGUMENT" // etcdserver: user name is empty
	}
	// Other tokens of the cloud are not tokens of etcd's Auth.
	return unauthenticated[false]
}

func expectedByRole(a access, isREST bool, r row, c column) string {
	allowed := a.allowsRole(c.user.role)
	switch c.kind {
	case noToken, invalidToken:
		return unauthenticated[isREST]
	case unprovenToken:
		return denied[isREST]
	case provenWithoutRole, roleHere:
		// The outcome for a tenant in which the caller has no role is that for a tenant that does not exist. Over REST both are
		// 403.
		if c.kind == provenWithoutRole && !isREST && (a.about == aboutOrg || a.about == aboutProject) {
			return noTenant
		}
		// These tokens are limited to a project or an org. Endpoints about the cloud need a token that is not.
		if !allowed || a.about == aboutCloud && !a.allows(callerAuthenticated) {
			return denied[isREST]
		}
		return r.allowed
	case cloudAdmin, cloudAdminNamingNone, cloudBilling:
		switch {
		case !allowed && a.about == aboutProject && !isREST:
			return noTenant // a role in the cloud that gives no rights in the project is no role there
		case !allowed:
			return denied[isREST]
		}
		return expectedOfAdmin(a.about, isREST, r, c.kind != cloudAdminNamingNone)
	}
	// The caller has a role in another tenant.
	sameOrg := c.user.at.Org == web.Org
	switch {
	case !allowed:
		return denied[isREST]
	case a.about == aboutCloud && !a.allows(callerAuthenticated):
		return denied[isREST]
	case a.about == aboutCloud, a.about == aboutOrg && sameOrg:
		return r.allowed
	case a.about == aboutNamed, c.kind == otherTenant && namesTenant(r), strings.Contains(r.path, "$project"):
		return denied[isREST]
	case r.otherTenant != "":
		return r.otherTenant
	}
	return r.allowed
}

// expectedOfAdmin returns the outcome for an authorized caller with a role in the whole cloud, whose token is not limited
// to a tenant. naming reports whether the request names a project if it can.
func expectedOfAdmin(of about, isREST bool, r row, naming bool) string {
	switch {
	case of == aboutCloud, of == aboutNamed, strings.Contains(r.path, "$project"):
		return r.allowed
	case isREST && !(naming && namesTenant(r)):
		return denied[true]
	case naming:
		return r.allowed
	}
	return "INVALID_ARGUMENT"
}

// namesTenant reports whether a request names the tenant that it is about.
func namesTenant(r row) bool {
	return strings.Contains(r.body, `_id":"$org"`) || strings.Contains(r.body, `_id":"$project"`)
}

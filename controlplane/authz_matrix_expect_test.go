package main

import (
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// row is one row of the authorization matrix. It has the request for an endpoint, and expected outcomes that do not
// follow from authorizedCallers.
type row struct {
	// name is the value of endpoint.row.
	name string
	// path is the HTTP path, and body the request as JSON. In both, $name is replaced by the ID of a resource of
	// project web, $no-name by an ID that does not exist, $new by a new name, and $uuid by a random UUID.
	path, body string
	// allowed is the outcome for callers who are authorized to call the endpoint.
	allowed string
	// otherTenant is the outcome for callers who may call the endpoint in another tenant and whose request names a
	// resource of project web but no tenant. Empty means the same as allowed.
	otherTenant string
	// tokenScope is the scope of the tokens with which the endpoint is called: "org", or empty for a project.
	tokenScope string
	// drain is set for streams that the server allows only one at a time. Such a stream is read to its end before the
	// next call.
	drain bool
	// cleanup, if set, is called after each call of the endpoint to undo its effect.
	cleanup func(h *testMember)
	// exceptions lists outcomes that differ, in some columns of the authorization matrix, from what authorizedCallers
	// implies.
	exceptions []exception
	// order is the position of the row among all rows. Endpoints are called in the order of their rows.
	order int
}

// exception states the outcome of an endpoint in some columns of the authorization matrix, and why it differs from the
// usual one.
type exception struct {
	// columns lists the names of columns of the authorization matrix.
	columns []string
	answer  string
	why     string
}

// scope returns the scope of the tokens with which this row is called, for a caller with a role in the given project.
func (r row) scope(project cloud.Tenant) cloud.Tenant {
	if r.tokenScope == "org" {
		project.Project = ""
	}
	return project
}

// Outcomes of refused calls, over gRPC (key false) and REST (key true). They are part of the wire contract.
var (
	unauthenticated = map[bool]string{false: "UNAUTHENTICATED", true: "401 UNAUTHENTICATED"}
	denied          = map[bool]string{false: "PERMISSION_DENIED", true: "403 FORBIDDEN"}
)

// noTenant is the outcome of a gRPC call in a tenant that does not exist or in which the caller has no role. It differs
// from NOT_FOUND for a resource that does not exist in the tenant.
const noTenant = "NOT_FOUND of the tenant"

// expected returns the only correct outcome of calling endpoint e with the token of column c. It is computed from
// authorizedCallers and from the rules of authentication and tenancy, which it implements independently of package
// auth.
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
		// gRPC verifies a token even if the method requires none. Only gRPC's own services on etcd's ports do not.
		return unauthenticated[false]
	case e.access.allows(callerAnyone):
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
	// A token of the cloud's other users is not valid for etcd's Auth.
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
		// A tenant in which the caller has no role has the same outcome as one that does not exist. Over REST both are
		// 403.
		if c.kind == provenWithoutRole && !isREST && (a.about == aboutOrg || a.about == aboutProject) {
			return noTenant
		}
		// These tokens are limited to a project or an org, but endpoints about the cloud require a token without a
		// limit.
		if !allowed || a.about == aboutCloud && !a.allows(callerAuthenticated) {
			return denied[isREST]
		}
		return r.allowed
	case cloudAdmin, cloudAdminNamingNone, cloudBilling:
		switch {
		case !allowed && a.about == aboutProject && !isREST:
			return noTenant // a role in the cloud that gives no rights in the project counts as none there
		case !allowed:
			return denied[isREST]
		}
		return expectedOfAdmin(a.about, isREST, r, c.kind != cloudAdminNamingNone)
	}
	// In all other columns, the caller has a role in another tenant.
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

// expectedOfAdmin returns the outcome for an authorized caller with a role in the entire cloud, whose token is not
// limited to a tenant. naming is set unless the column removes the tenant from the request.
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

// namesTenant reports whether the request names, in its body, the tenant that it acts on.
func namesTenant(r row) bool {
	return strings.Contains(r.body, `_id":"$org"`) || strings.Contains(r.body, `_id":"$project"`)
}

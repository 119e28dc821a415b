package identity

import (
	"net/http"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// rpcRoutes registers the routes that are served by RPCs, which need a token. Their paths begin with /api/v1/identity,
// because the wire contract has /api/v1/users and /api/v1/projects without a credential.
func (s *Service) rpcRoutes(r *rest.Server) {
	protorest.Serve(r, &identityv1.IdentityService_ServiceDesc, &server{s: s}, rows())
}

// rows returns the table of the routes, with the RPCs that serve them.
func rows() []protorest.Row {
	const (
		base     = "/api/v1/identity"
		users    = base + "/users"
		user     = users + "/{user_id}"
		bindings = base + "/bindings"
		invited  = base + "/invitations"
		accounts = base + "/service-accounts"
		orgs     = base + "/orgs"
		projects = base + "/projects"
		groups   = base + "/groups"
		group    = groups + "/{group_id}"
		quota    = base + "/quota"
		defaults = base + "/default-quota"
		keys     = base + "/keys"
	)
	return []protorest.Row{
		{Method: http.MethodGet, Path: base + "/whoami", RPC: "WhoAmI"},
		{Method: http.MethodGet, Path: base + "/login-providers", RPC: "ListLoginProviders"},
		{Method: http.MethodPost, Path: base + "/tokens/revoke", RPC: "RevokeToken"},

		{Method: http.MethodGet, Path: users, RPC: "ListUsers"},
		{Method: http.MethodPost, Path: users, RPC: "CreateUser", Creates: true},
		{Method: http.MethodGet, Path: user, RPC: "GetUser"},
		{Method: http.MethodPatch, Path: user, RPC: "UpdateUser"},
		{Method: http.MethodDelete, Path: user, RPC: "DeleteUser"},
		{Method: http.MethodPost, Path: user + "/disable", RPC: "DisableUser"},
		{Method: http.MethodPost, Path: user + "/enable", RPC: "EnableUser"},
		{Method: http.MethodPost, Path: user + "/password", RPC: "SetPassword"},
		{Method: http.MethodPost, Path: user + "/tokens/revoke", RPC: "RevokeTokens"},
		{Method: http.MethodPost, Path: user + "/identities", RPC: "LinkIdentity"},
		{Method: http.MethodPost, Path: user + "/identities/unlink", RPC: "UnlinkIdentity"},

		{Method: http.MethodGet, Path: bindings, RPC: "ListBindings"},
		{Method: http.MethodPost, Path: bindings, RPC: "BindRole"},
		{Method: http.MethodPost, Path: bindings + "/remove", RPC: "UnbindRole"},

		{Method: http.MethodGet, Path: invited, RPC: "ListInvitations"},
		{Method: http.MethodPost, Path: invited + "/accept", RPC: "AcceptInvitation"},
		{Method: http.MethodPost, Path: invited + "/decline", RPC: "DeclineInvitation"},

		{Method: http.MethodGet, Path: accounts, RPC: "ListServiceAccounts"},
		{Method: http.MethodPost, Path: accounts, RPC: "CreateServiceAccount", Creates: true},
		{Method: http.MethodGet, Path: accounts + "/{id}", RPC: "GetServiceAccount"},
		{Method: http.MethodPatch, Path: accounts + "/{id}", RPC: "UpdateServiceAccount"},
		{Method: http.MethodDelete, Path: accounts + "/{id}", RPC: "DeleteServiceAccount"},

		{Method: http.MethodGet, Path: orgs, RPC: "ListOrgs"},
		{Method: http.MethodPost, Path: orgs, RPC: "CreateOrg", Creates: true},
		{Method: http.MethodGet, Path: orgs + "/{id}", RPC: "GetOrg"},
		{Method: http.MethodPatch, Path: orgs + "/{id}", RPC: "UpdateOrg"},
		{Method: http.MethodDelete, Path: orgs + "/{id}", RPC: "DeleteOrg"},

		{Method: http.MethodGet, Path: projects, RPC: "ListProjects"},
		{Method: http.MethodPost, Path: projects, RPC: "CreateProject", Creates: true},
		{Method: http.MethodGet, Path: projects + "/{id}", RPC: "GetProject"},
		{Method: http.MethodPatch, Path: projects + "/{id}", RPC: "UpdateProject"},
		{Method: http.MethodDelete, Path: projects + "/{id}", RPC: "DeleteProject"},

		{Method: http.MethodGet, Path: groups, RPC: "ListGroups"},
		{Method: http.MethodPost, Path: groups, RPC: "CreateGroup", Creates: true},
		{Method: http.MethodGet, Path: groups + "/{id}", RPC: "GetGroup"},
		{Method: http.MethodPatch, Path: groups + "/{id}", RPC: "UpdateGroup"},
		{Method: http.MethodDelete, Path: groups + "/{id}", RPC: "DeleteGroup"},
		{Method: http.MethodGet, Path: group + "/members", RPC: "ListGroupMembers"},
		{Method: http.MethodPost, Path: group + "/members", RPC: "AddGroupMember"},
		{Method: http.MethodDelete, Path: group + "/members/{user_id}", RPC: "RemoveGroupMember"},

		{Method: http.MethodGet, Path: quota, RPC: "GetQuota"},
		{Method: http.MethodPut, Path: quota, RPC: "SetQuota"},
		{Method: http.MethodGet, Path: defaults, RPC: "GetDefaultQuota"},
		{Method: http.MethodPut, Path: defaults, RPC: "SetDefaultQuota"},

		{Method: http.MethodGet, Path: keys, RPC: "ListKeys"},
		{Method: http.MethodPost, Path: keys + "/rotate", RPC: "RotateKeys"},
		{Method: http.MethodPost, Path: keys + "/{key_id}/revoke", RPC: "RevokeKey"},

		{Method: http.MethodGet, Path: base + "/audit", RPC: "ListAuditRecords"},
	}
}

package auth

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func caller(proof cloud.Proof, scope cloud.Tenant, bindings ...cloud.Binding) *cloud.Caller {
	return &cloud.Caller{User: "u", Proof: proof, Scope: scope, Bindings: bindings}
}

func in(role cloud.Role, org cloud.OrgID, project cloud.ProjectID) cloud.Binding {
	return cloud.Binding{Role: role, Org: org, Project: project}
}

// Who may what, and where: the tenant rule and the table together.
func TestAdmit(t *testing.T) {
	const get, create, list, cordon = vms + "GetVm", vms + "CreateVm", images + "ListImages", nodes + "CordonNode"
	op := cloud.Tenant{Org: "o", Project: "p"}
	member := caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.ProjectMember, "o", "p"))
	viewer := caller(cloud.ProofPassword, op, in(cloud.ProjectViewer, "o", "p"))
	two := caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.ProjectMember, "o", "p"), in(cloud.ProjectViewer, "o", "q"))
	orgAdmin := caller(cloud.ProofPassword, cloud.Tenant{Org: "o", Project: "q"}, in(cloud.OrgAdmin, "o", ""))
	foreign := caller(cloud.ProofPassword, op, in(cloud.ProjectMember, "x", "p"))
	admin := caller(cloud.ProofHostKey, cloud.Tenant{}, in(cloud.SystemAdmin, "", ""))
	adminInP := caller(cloud.ProofHostKey, op, in(cloud.SystemAdmin, "", ""))
	for _, c := range []struct {
		name         string
		who          *cloud.Caller
		edge         Edge
		method       Method
		org, project string
		tenant       cloud.Tenant
		kind         fault.Kind
		says         string
	}{
		{name: "nobody", method: get, kind: fault.Unauthenticated, says: "Bearer"},
		{name: "unproven", who: caller(cloud.ProofNone, op, in(cloud.SystemAdmin, "", "")), method: get, kind: fault.PermissionDenied, says: "proved nothing"},
		{name: "no proof at all", who: caller("", op, in(cloud.SystemAdmin, "", "")), method: get, kind: fault.PermissionDenied, says: "proved nothing"},
		{name: "no role", who: caller(cloud.ProofPassword, cloud.Tenant{}), method: get, kind: fault.PermissionDenied, says: "no role in any project"},
		{name: "a host", who: &cloud.Caller{Node: "n"}, method: get, kind: fault.PermissionDenied, says: "not for hosts"},
		{name: "one project, unsaid", who: member, method: create, tenant: op},
		{name: "one project, said", who: member, method: create, org: "o", project: "p", tenant: op},
		{name: "another project said", who: member, method: create, org: "o", project: "q", kind: fault.PermissionDenied, says: "acts in o/p"},
		{name: "another org said", who: member, method: create, org: "x", kind: fault.PermissionDenied, says: "acts in o/p"},
		{name: "two projects", who: two, method: get, kind: fault.PermissionDenied, says: "o/p, o/q"},
		{name: "two projects, one said", who: two, method: get, org: "o", project: "p", kind: fault.PermissionDenied, says: "several"},
		{name: "viewer reads", who: viewer, method: get, tenant: op},
		{name: "viewer writes", who: viewer, method: create, kind: fault.PermissionDenied, says: "may not CreateVm"},
		{name: "org admin in any project", who: orgAdmin, method: create, tenant: cloud.Tenant{Org: "o", Project: "q"}},
		{name: "role in another org's project", who: foreign, method: get, kind: fault.PermissionDenied, says: "may not GetVm"},
		{name: "images are the org's", who: member, method: list, org: "o", tenant: cloud.Tenant{Org: "o"}},
		{name: "images of another org", who: member, method: list, org: "x", kind: fault.PermissionDenied},
		{name: "admin without project, RPC", who: admin, method: get, org: "o", kind: fault.InvalidArgument, says: "project_id"},
		{name: "admin without org, RPC", who: admin, method: list, kind: fault.InvalidArgument, says: "org_id"},
		{name: "admin with project, RPC", who: admin, method: get, org: "o", project: "p", tenant: op},
		{name: "admin without project, REST", who: admin, edge: REST, method: get, kind: fault.PermissionDenied, says: "token with org_id and project_id"},
		{name: "admin with a project's token, REST", who: adminInP, edge: REST, method: get, tenant: op},
		{name: "admin with a project's token elsewhere", who: adminInP, method: get, org: "o", project: "q", kind: fault.PermissionDenied},
		{name: "cordon by admin", who: admin, method: cordon},
		{name: "cordon by member", who: member, method: cordon, kind: fault.PermissionDenied},
		{name: "nodes by member", who: member, method: nodes + "ListNodes"},
		{name: "unknown method", who: admin, method: "/x/Y", kind: fault.PermissionDenied, says: "not open"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx := t.Context()
			if c.who != nil {
				ctx = With(ctx, c.who, c.edge)
			}
			tenant, err := Admit(ctx, c.method, c.org, c.project)
			if c.kind == fault.Internal {
				require.NoError(t, err)
				require.Equal(t, c.tenant, tenant)
				return
			}
			require.True(t, fault.Is(err, c.kind), "%v", err)
			require.ErrorContains(t, err, c.says)
			require.Zero(t, tenant)
		})
	}
}

func TestBearer(t *testing.T) {
	for header, want := range map[string]string{"Bearer abc": "abc", "bearer  abc ": "abc", "": "", "Basic abc": "", "Bearer": "", "Bearer ": ""} {
		token, err := Bearer(header)
		require.Equal(t, want, token, header)
		require.Equal(t, want == "", fault.Is(err, fault.Unauthenticated), header)
	}
}

package auth

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// registry is a Verifier that also implements Projects: it maps project IDs to the IDs of their orgs.
type registry map[cloud.ProjectID]cloud.OrgID

func (registry) Verify(context.Context, string) (*cloud.Caller, error) { return nil, nil }

func (r registry) OrgOf(_ context.Context, id cloud.ProjectID) (cloud.OrgID, error) {
	return r[id], nil
}

// TestCallSelectsItsTenant checks which tenant a call gets, depending on the request, the metadata, the token's scope,
// and the roles and defaults of the caller.
func TestCallSelectsItsTenant(t *testing.T) {
	const get, list, bind, wallet = vms + "GetVm", images + "ListImages", identity + "BindRole", credits + "GetWallet"
	projects := registry{"p": "o", "q": "o", "y": "x"}
	op, oq, xy := cloud.Tenant{Org: "o", Project: "p"}, cloud.Tenant{Org: "o", Project: "q"}, cloud.Tenant{Org: "x", Project: "y"}
	member := in(cloud.ProjectMember, "o", "p")
	boss := in(cloud.OrgAdmin, "o", "")
	admin := in(cloud.SystemAdmin, "", "")
	settled := cloud.Defaults{}.WithBindings([]cloud.Binding{member})
	for _, c := range []struct {
		name                 string
		scope, chosen, asked cloud.Tenant
		roles                []cloud.Binding
		defaults             cloud.Defaults
		edge                 Edge
		method               Method
		tenant               cloud.Tenant
		kind                 fault.Kind
		says                 string
	}{
		{name: "roles in two projects, request names one", roles: []cloud.Binding{member, in(cloud.ProjectMember, "x", "y")}, asked: cloud.Tenant{Project: "y"}, tenant: xy},
		{name: "roles in two projects, metadata names one", roles: []cloud.Binding{member, in(cloud.ProjectMember, "x", "y")}, chosen: cloud.Tenant{Project: "y"}, tenant: xy},
		{name: "roles in two projects, header names one", edge: REST, roles: []cloud.Binding{member, in(cloud.ProjectMember, "x", "y")}, chosen: xy, tenant: xy},
		{name: "metadata names an org with one project", roles: []cloud.Binding{member, in(cloud.ProjectMember, "x", "y")}, chosen: cloud.Tenant{Org: "x"}, tenant: xy},
		{name: "the request overrides the metadata", roles: []cloud.Binding{member, in(cloud.ProjectMember, "x", "y")}, asked: op, chosen: xy, tenant: op},
		{name: "roles in two projects, none named", roles: []cloud.Binding{member, in(cloud.ProjectMember, "x", "y")}, kind: fault.PermissionDenied, says: "one of o/p, x/y"},
		{name: "roles in two projects, one is the default", roles: []cloud.Binding{member, in(cloud.ProjectMember, "x", "y")}, defaults: settled, tenant: op},
		{name: "roles in two orgs, one is the default, images", method: list, roles: []cloud.Binding{member, in(cloud.OrgAdmin, "x", "")}, defaults: settled, tenant: cloud.Tenant{Org: "o"}},
		{name: "a default without a role is ignored", roles: []cloud.Binding{in(cloud.ProjectMember, "x", "y")}, defaults: settled, tenant: xy},
		{name: "the default was removed, several projects remain", roles: []cloud.Binding{in(cloud.ProjectMember, "x", "y"), in(cloud.ProjectMember, "o", "q")}, defaults: settled, kind: fault.PermissionDenied, says: "several projects"},
		{name: "the default of a token's org", scope: cloud.Tenant{Org: "o"}, roles: []cloud.Binding{member, in(cloud.ProjectMember, "o", "q")}, defaults: settled, tenant: op},
		{name: "org admin names a project", roles: []cloud.Binding{boss}, asked: cloud.Tenant{Project: "q"}, tenant: oq},
		{name: "org admin names org and project", roles: []cloud.Binding{boss}, chosen: oq, tenant: oq},
		{name: "org admin of an org's token", scope: cloud.Tenant{Org: "o"}, roles: []cloud.Binding{boss}, chosen: cloud.Tenant{Project: "q"}, tenant: oq},
		{name: "org admin, a wallet", edge: REST, method: wallet, roles: []cloud.Binding{boss}, asked: cloud.Tenant{Project: "q"}, tenant: oq},
		{name: "org admin names none", roles: []cloud.Binding{boss}, kind: fault.PermissionDenied, says: "to a project of org o"},
		{name: "org admin names another org's project", roles: []cloud.Binding{boss}, asked: cloud.Tenant{Project: "y"}, kind: fault.NotFound, says: "no project y"},
		{name: "org admin names another org's project with the own org", roles: []cloud.Binding{boss}, asked: cloud.Tenant{Org: "o", Project: "y"}, kind: fault.NotFound, says: "no project y"},
		{name: "org admin names an invalid ID", roles: []cloud.Binding{boss}, asked: cloud.Tenant{Project: "a/b"}, kind: fault.InvalidArgument, says: "project_id"},
		{name: "a project's token, metadata names another project", scope: op, roles: []cloud.Binding{member, in(cloud.ProjectMember, "x", "y")}, chosen: xy, kind: fault.PermissionDenied, says: "limited to o/p and cannot be used for x/y"},
		{name: "admin by header", edge: REST, roles: []cloud.Binding{admin}, chosen: cloud.Tenant{Project: "y"}, tenant: xy},
		{name: "admin in a wrong org", roles: []cloud.Binding{admin}, asked: cloud.Tenant{Org: "o", Project: "y"}, kind: fault.NotFound, says: "no project y"},
		{name: "metadata does not turn a cloud-wide call into one about an org", method: bind, roles: []cloud.Binding{boss}, chosen: cloud.Tenant{Org: "o"}, kind: fault.PermissionDenied, says: "may not BindRole"},
	} {
		t.Run(c.name, func(t *testing.T) {
			who := caller(cloud.ProofPassword, c.scope, c.roles...)
			who.Chosen, who.Defaults = c.chosen, c.defaults
			method := c.method
			if method == "" {
				method = get
			}
			got, err := Admit(With(WithProjects(t.Context(), projects), who, c.edge), method, string(c.asked.Org), string(c.asked.Project))
			require.Equal(t, c.tenant, got)
			if c.says == "" {
				require.NoError(t, err)
				return
			}
			require.True(t, fault.Is(err, c.kind), "%v", err)
			require.ErrorContains(t, err, c.says)
		})
	}
}

// TestForeignProjectIsNotFound names another tenant's project in each possible way. The error must be the same as for a
// project that does not exist, and must not contain the project's org.
func TestForeignProjectIsNotFound(t *testing.T) {
	projects := registry{"theirs": "acme", "own": "evil"}
	for name, ask := range map[string]func(id cloud.ProjectID) error{
		"request": func(id cloud.ProjectID) error {
			return admitAt(t, projects, RPC, caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.OrgAdmin, "evil", "")), cloud.Tenant{Project: id})
		},
		"request with the own org": func(id cloud.ProjectID) error {
			return admitAt(t, projects, RPC, caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.OrgAdmin, "evil", "")), cloud.Tenant{Org: "evil", Project: id})
		},
		"header": func(id cloud.ProjectID) error {
			c := caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.ProjectViewer, "evil", "own"))
			c.Chosen.Project = id
			return admitAt(t, projects, REST, c, cloud.Tenant{})
		},
		"token": func(id cloud.ProjectID) error {
			return admitAt(t, projects, RPC, caller(cloud.ProofPassword, cloud.Tenant{Project: id}, in(cloud.OrgAdmin, "evil", "")), cloud.Tenant{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			theirs, none := ask("theirs"), ask("nobodys")
			require.Error(t, theirs)
			require.Equal(t, "no project theirs: it does not exist, or u has no role in it", theirs.Error())
			require.Equal(t, "no project nobodys: it does not exist, or u has no role in it", none.Error())
			f, _ := fault.From(theirs)
			g, _ := fault.From(none)
			require.Equal(t, f.Kind, g.Kind)
			var a countingAuditor
			ReportFailure(&a, caller(cloud.ProofPassword, cloud.Tenant{}), vms+"GetVm", f, "", "")
			require.Equal(t, []int{0, 1}, []int{a.done, a.failed}, "a refused read of another tenant is recorded in the audit")
		})
	}
}

func admitAt(t *testing.T, projects registry, edge Edge, c *cloud.Caller, at cloud.Tenant) error {
	_, err := Admit(With(WithProjects(t.Context(), projects), c, edge), vms+"GetVm", string(at.Org), string(at.Project))
	return err
}

func TestChosen(t *testing.T) {
	got, err := Chosen("trivet-org", []string{"acme"}, "trivet-project", []string{"web"})
	require.NoError(t, err)
	require.Equal(t, cloud.Tenant{Org: "acme", Project: "web"}, got)
	got, err = Chosen("trivet-org", nil, "trivet-project", []string{""})
	require.NoError(t, err)
	require.Zero(t, got)
	for _, bad := range [][]string{{"a", "b"}, {"a/b"}, {"a\nb"}} {
		_, err = Chosen("trivet-org", nil, "trivet-project", bad)
		require.True(t, fault.Is(err, fault.InvalidArgument), "%q: %v", bad, err)
	}
}

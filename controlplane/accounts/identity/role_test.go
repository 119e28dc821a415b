package identity

import (
	"testing"

	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestRolesGrantPermissions gives roles, sets quotas and deletes projects as an administrator of an org, of a project
// and of another org. Each may act only within their own org or project, and may give no role above their own.
func TestRolesGrantPermissions(t *testing.T) {
	w := newWorld(t)
	w.user("root", cloud.Binding{Role: cloud.OrgAdmin, Org: "acme"})
	w.user("pam", cloud.Binding{Role: cloud.ProjectAdmin, Org: "acme", Project: "web"})
	w.user("bob")
	w.user("eve", cloud.Binding{Role: cloud.OrgAdmin, Org: "evil"})
	r := &server{s: w.first}
	bind := func(who string, b cloud.Binding) error {
		return errOf(r.BindRole(w.login(who), &identityv1.BindRoleRequest{UserId: "bob", Binding: oneOnWire(b)}))
	}
	in := func(role cloud.Role, org cloud.OrgID, project cloud.ProjectID) cloud.Binding {
		return cloud.Binding{Role: role, Org: org, Project: project}
	}
	for _, c := range []struct {
		who  string
		b    cloud.Binding
		kind fault.Kind
		ok   bool
	}{
		{"pam", in(cloud.ProjectMember, "acme", "web"), 0, true},
		{"pam", in(cloud.ProjectMember, "acme", "other"), fault.PermissionDenied, false},
		{"pam", in(cloud.OrgAdmin, "acme", ""), fault.PermissionDenied, false},
		{"pam", in(cloud.SystemAdmin, "", ""), fault.PermissionDenied, false},
		{"root", in(cloud.OrgAdmin, "acme", ""), 0, true},
		{"root", in(cloud.ProjectAdmin, "acme", "web"), 0, true},
		{"root", in(cloud.ProjectAdmin, "acme", "nowhere"), fault.NotFound, false},
		{"root", in(cloud.SystemAdmin, "", ""), fault.PermissionDenied, false},
		{"root", in(cloud.BillingAdmin, "", ""), fault.PermissionDenied, false},
		{"root", in(cloud.OrgAdmin, "evil", ""), fault.PermissionDenied, false},
		{"eve", in(cloud.ProjectAdmin, "acme", "web"), fault.PermissionDenied, false},
		{"eve", in(cloud.ProjectAdmin, "evil", "web"), fault.NotFound, false},
		{"eve", in(cloud.OrgAdmin, "evil", "web"), fault.InvalidArgument, false},
		{"eve", in(cloud.OrgAdmin, "acme", "web"), fault.PermissionDenied, false},
		{"eve", in(cloud.OrgAdmin, "", "web"), fault.PermissionDenied, false},
		{"eve", in(cloud.SystemAdmin, "evil", ""), fault.InvalidArgument, false},
		{"eve", in(cloud.SystemAdmin, "acme", "web"), fault.PermissionDenied, false},
		{"eve", in(cloud.BillingAdmin, "evil", ""), fault.InvalidArgument, false},
		{"pam", in(cloud.BillingAdmin, "", ""), fault.PermissionDenied, false},
		{"pam", in(cloud.OrgAdmin, "acme", "web"), fault.InvalidArgument, false},
		{"bob", in(cloud.ProjectAdmin, "evil", "lair"), fault.PermissionDenied, false},
	} {
		err := bind(c.who, c.b)
		require.Equal(t, c.ok, err == nil, "%s %v: %v", c.who, c.b, err)
		require.True(t, c.ok || fault.Is(err, c.kind), "%s %v: %v", c.who, c.b, err)
	}
	scoped := w.as(w.first, w.token(w.first, tokenRequest{User: "root", Password: secret, Org: "acme", Project: "web"}))
	err := errOf(r.CreateProject(scoped, &identityv1.CreateProjectRequest{Id: "more", OrgId: "acme"}))
	require.ErrorContains(t, err, "limited to acme/web", "a token of a project reaches no further")

	require.True(t, fault.Is(errOf(r.GetProject(w.login("eve"), &identityv1.GetProjectRequest{Id: "web"})), fault.NotFound))
	require.True(t, fault.Is(errOf(r.GetOrg(w.login("eve"), &identityv1.GetOrgRequest{Id: "acme"})), fault.NotFound))
	seen, err := r.ListProjects(w.login("pam"), &identityv1.ListProjectsRequest{})
	require.NoError(t, err)
	require.Len(t, seen.GetProjects(), 1)
	orgs, err := r.ListOrgs(w.login("eve"), &identityv1.ListOrgsRequest{})
	require.NoError(t, err)
	require.Len(t, orgs.GetOrgs(), 1)
	grants, err := r.ListBindings(w.login("root"), &identityv1.ListBindingsRequest{OrgId: "acme"})
	require.NoError(t, err)
	require.Len(t, grants.GetGrants(), 5)

	err = errOf(r.SetQuota(w.login("root"), &identityv1.SetQuotaRequest{OrgId: "acme", ProjectId: "web"}))
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
	two := uint64(2)
	got, err := r.SetQuota(w.admin(), &identityv1.SetQuotaRequest{ProjectId: "web", Quota: &identityv1.Quota{Vms: &two}})
	require.NoError(t, err)
	require.EqualValues(t, 2, got.GetQuota().GetVms())
	require.Nil(t, got.GetQuota().Vcpus)
	require.Equal(t, "acme", got.GetOrgId())
	require.True(t, fault.Is(errOf(r.SetQuota(w.admin(), &identityv1.SetQuotaRequest{OrgId: "evil", ProjectId: "web"})), fault.NotFound))

	w.first.opts.Holds = []func(store.Reader, cloud.Tenant) error{func(_ store.Reader, t cloud.Tenant) error {
		if t.Project == "" {
			return nil
		}
		return fault.New(fault.FailedPrecondition, "project web has a wallet: close it first")
	}}
	remove := func(who string, org string) error {
		return errOf(r.DeleteProject(w.login(who), &identityv1.DeleteProjectRequest{Id: "web", OrgId: org}))
	}
	require.True(t, fault.Is(remove("pam", "acme"), fault.PermissionDenied))
	require.True(t, fault.Is(remove("eve", "evil"), fault.NotFound))
	require.ErrorContains(t, remove("root", "acme"), "close it first")
	w.first.opts.Holds = nil
	var forgotten cloud.Tenant
	w.first.opts.Forget = []func(*store.Tx, cloud.Tenant) error{func(_ *store.Tx, t cloud.Tenant) error {
		forgotten = t
		return nil
	}}
	require.NoError(t, remove("root", "acme"))
	require.Equal(t, cloud.Tenant{Org: "acme", Project: "web"}, forgotten)
	_, err = auth.Admit(w.login("pam"), "/vmcontroller.v1.VmService/CreateVm", "", "")
	require.ErrorContains(t, err, "no role in any project", "a role goes with what it is for")
}

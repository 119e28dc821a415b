package identity

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// groupOf creates a group of org acme with these members.
func (w *world) groupOf(by context.Context, id string, members ...string) {
	w.t.Helper()
	r := &server{s: w.first}
	_, err := r.CreateGroup(by, &identityv1.CreateGroupRequest{OrgId: "acme", Id: id})
	require.NoError(w.t, err)
	for _, m := range members {
		require.NoError(w.t, w.join(by, id, m))
	}
}

func (w *world) join(by context.Context, group, user string) error {
	return errOf((&server{s: w.first}).AddGroupMember(by, &identityv1.AddGroupMemberRequest{OrgId: "acme", GroupId: group, UserId: user}))
}

func (w *world) bindGroup(by context.Context, group string, b cloud.Binding) error {
	return errOf((&server{s: w.first}).BindRole(by, &identityv1.BindRoleRequest{GroupId: group, Binding: oneOnWire(b)}))
}

// TestGroups checks that the members of a group have its roles at once, with a token in use, until they leave it, the
// group loses the role or the group is deleted.
func TestGroups(t *testing.T) {
	w, r := newTwoOrgs(t)
	bob := w.login("bob") // org:admin
	shop := cloud.Binding{Role: cloud.ProjectMember, Org: "acme", Project: "shop"}
	w.place(shop)
	text := w.token(w.first, tokenRequest{User: "ada", Password: secret})
	may := func() bool {
		_, err := auth.Admit(w.as(w.first, text), getVM, "acme", "shop")
		return err == nil
	}
	w.groupOf(bob, "devs", "ada")
	require.False(t, may(), "a group without roles gives none")
	require.NoError(t, w.bindGroup(bob, "devs", shop))
	require.True(t, may(), "a member does not have the group's role")
	at, err := w.tenantOfCall(text, getVM)
	require.NoError(t, err)
	require.Equal(t, inWeb, at, "the role of a group changed the tenant of a token in use")

	me, err := r.WhoAmI(w.as(w.first, text), &identityv1.WhoAmIRequest{})
	require.NoError(t, err)
	require.Len(t, me.GetBindings(), 2)
	require.Equal(t, "devs", me.GetGroups()[0].GetId())
	require.Equal(t, "shop", me.GetGroups()[0].GetBindings()[0].GetProjectId())
	u, err := r.GetUser(w.admin(), &identityv1.GetUserRequest{Id: "ada"})
	require.NoError(t, err)
	require.Len(t, u.GetBindings(), 1, "the roles of groups are not the user's own")
	require.Equal(t, "devs", u.GetGroups()[0].GetGroupId())
	list, err := r.ListBindings(bob, &identityv1.ListBindingsRequest{OrgId: "acme", ProjectId: "shop"})
	require.NoError(t, err)
	require.Len(t, list.GetGrants(), 1)
	require.Equal(t, "devs", list.GetGrants()[0].GetGroupId())
	scoped := w.token(w.first, tokenRequest{User: "ada", Password: secret, Org: "acme", Project: "shop", Strict: true})
	at, err = w.tenantOfCall(scoped, getVM)
	require.NoError(t, err)
	require.Equal(t, shop.Tenant(), at)

	_, err = r.UnbindRole(bob, &identityv1.UnbindRoleRequest{UserId: "ada", Binding: oneOnWire(shop)})
	require.ErrorContains(t, err, "by the group devs", "ada keeps the role")

	leave := &identityv1.RemoveGroupMemberRequest{OrgId: "acme", GroupId: "devs", UserId: "ada"}
	for range 2 {
		_, err = r.RemoveGroupMember(bob, leave)
		require.NoError(t, err)
		require.False(t, may(), "a user who left the group still has its role")
	}
	require.NoError(t, w.join(bob, "devs", "ada"))
	require.True(t, may())
	_, err = r.UnbindRole(bob, &identityv1.UnbindRoleRequest{GroupId: "devs", Binding: oneOnWire(shop)})
	require.NoError(t, err)
	require.False(t, may(), "the group still has a role that was taken away")
	require.NoError(t, w.bindGroup(bob, "devs", shop))
	_, err = r.DeleteOrg(w.admin(), &identityv1.DeleteOrgRequest{Id: "acme"})
	require.ErrorContains(t, err, "has group devs")
	_, err = r.DeleteGroup(bob, &identityv1.DeleteGroupRequest{OrgId: "acme", Id: "devs"})
	require.NoError(t, err)
	require.False(t, may(), "a deleted group still gives a role")
	w.groupOf(bob, "devs")
	require.NoError(t, w.bindGroup(bob, "devs", shop))
	require.False(t, may(), "a new group of the same ID has the members of the deleted one")
}

// TestAddedGroupRoleKeepsTheDefaultProject checks that the first project which a user gets by a group stays the tenant
// of calls that name none, whatever roles the user or its groups get later.
func TestAddedGroupRoleKeepsTheDefaultProject(t *testing.T) {
	w, r := newTwoOrgs(t)
	bob := w.login("bob")
	_, err := r.CreateUser(w.admin(), &identityv1.CreateUserRequest{Id: "eve", OrgId: "acme"})
	require.NoError(t, err)
	_, err = r.SetPassword(w.admin(), &identityv1.SetPasswordRequest{UserId: "eve", Password: secret})
	require.NoError(t, err)
	w.groupOf(bob, "devs", "eve")
	w.groupOf(bob, "ops", "eve")
	require.NoError(t, w.bindGroup(bob, "devs", web))
	text := w.token(w.first, tokenRequest{User: "eve", Password: secret})
	for i, add := range []func(cloud.Binding) error{
		func(b cloud.Binding) error { return w.bindGroup(bob, "devs", b) },
		func(b cloud.Binding) error { return w.bindGroup(bob, "ops", b) },
		func(b cloud.Binding) error { return w.grant(bob, "eve", b) },
	} {
		b := cloud.Binding{Role: cloud.ProjectViewer, Org: "acme", Project: cloud.ProjectID(fmt.Sprintf("extra-%d", i))}
		w.place(b)
		require.NoError(t, add(b))
		at, err := w.tenantOfCall(text, getVM)
		require.NoError(t, err, "an added role broke a token in use")
		require.Equal(t, inWeb, at)
	}
	_, err = r.UnbindRole(bob, &identityv1.UnbindRoleRequest{UserId: "eve", Binding: oneOnWire(cloud.Binding{Role: cloud.ProjectViewer, Org: "acme", Project: "extra-2"})})
	require.NoError(t, err)
	at, err := w.tenantOfCall(text, getVM)
	require.NoError(t, err)
	require.Equal(t, inWeb, at)
}

// TestGroupMembersBelongToTheOrg checks that an org:admin adds only users of its own org to a group, that the refusal
// does not reveal whether a user exists, and that a group has roles in its own org only.
func TestGroupMembersBelongToTheOrg(t *testing.T) {
	w, r := newTwoOrgs(t)
	bob, mallory := w.login("bob"), w.login("mallory")
	w.groupOf(bob, "devs")
	refusals := map[string]string{}
	for _, user := range []string{"mallory", "nobody", "admin"} {
		err := w.join(bob, "devs", user)
		require.True(t, fault.Is(err, fault.FailedPrecondition), "a user of another org was added: %v", err)
		refusals[fmt.Sprint(len(err.Error())-len(user))] = user
	}
	require.Len(t, refusals, 1, "the refusals differ: %v", refusals)
	require.NoError(t, w.join(w.admin(), "devs", "mallory"))
	require.True(t, fault.Is(w.join(w.admin(), "devs", "nobody"), fault.NotFound))
	require.True(t, fault.Is(w.join(bob, "ghosts", "ada"), fault.NotFound))
	account, err := r.CreateServiceAccount(bob, &identityv1.CreateServiceAccountRequest{OrgId: "acme", ProjectId: "web", Name: "ci", Roles: []string{"project:viewer"}})
	require.NoError(t, err)
	require.True(t, fault.Is(w.join(bob, "devs", account.GetAccount().GetId()), fault.FailedPrecondition), "a service account joined a group")

	require.True(t, fault.Is(w.join(mallory, "devs", "mallory"), fault.PermissionDenied))
	require.True(t, fault.Is(w.bindGroup(mallory, "devs", acme), fault.PermissionDenied))
	require.True(t, fault.Is(w.bindGroup(mallory, "devs", evil), fault.NotFound), "org evil has no such group")
	require.True(t, fault.Is(w.bindGroup(w.admin(), "devs", cloud.Binding{Role: cloud.SystemAdmin}), fault.InvalidArgument))
	_, err = r.BindRole(bob, &identityv1.BindRoleRequest{UserId: "ada", GroupId: "devs", Binding: oneOnWire(web)})
	require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
	for _, call := range []error{
		errOf(r.GetGroup(mallory, &identityv1.GetGroupRequest{OrgId: "acme", Id: "devs"})),
		errOf(r.ListGroups(mallory, &identityv1.ListGroupsRequest{OrgId: "acme"})),
		errOf(r.ListGroupMembers(mallory, &identityv1.ListGroupMembersRequest{OrgId: "acme", GroupId: "devs"})),
		errOf(r.DeleteGroup(mallory, &identityv1.DeleteGroupRequest{OrgId: "acme", Id: "devs"})),
	} {
		require.True(t, fault.Is(call, fault.PermissionDenied), "%v", call)
	}
	members, err := r.ListGroupMembers(bob, &identityv1.ListGroupMembersRequest{OrgId: "acme", GroupId: "devs"})
	require.NoError(t, err)
	require.Equal(t, []string{"mallory"}, members.GetUserIds())
	_, err = r.DeleteUser(w.admin(), &identityv1.DeleteUserRequest{UserId: "mallory"})
	require.NoError(t, err)
	members, err = r.ListGroupMembers(bob, &identityv1.ListGroupMembersRequest{OrgId: "acme", GroupId: "devs"})
	require.NoError(t, err)
	require.Empty(t, members.GetUserIds(), "a deleted user is still a member")
}

// TestServiceAccountByName checks that a service account logs in, and is found in users, bindings and the audit, by
// its name with its project.
func TestServiceAccountByName(t *testing.T) {
	w, r := newTwoOrgs(t)
	bob := w.login("bob")
	made, err := r.CreateServiceAccount(bob, &identityv1.CreateServiceAccountRequest{OrgId: "acme", ProjectId: "web", Name: "ci", Roles: []string{"project:viewer"}})
	require.NoError(t, err)
	require.Equal(t, "ci@acme/web", made.GetAccount().GetUsername())
	issue := func(user string) (*identityv1.IssueTokenResponse, error) {
		return r.IssueToken(t.Context(), &identityv1.IssueTokenRequest{Username: user, Password: made.GetSecret()})
	}
	token, err := issue("ci@acme/web")
	require.NoError(t, err)
	v, err := r.VerifyToken(t.Context(), &identityv1.VerifyTokenRequest{Token: token.GetToken()})
	require.NoError(t, err)
	require.Equal(t, made.GetAccount().GetId(), v.GetHolder().GetPrincipalId())
	require.Equal(t, "appcred", v.GetHolder().GetProof())
	for _, wrong := range []string{"ci@acme/nowhere", "ci@evil/web", "cd@acme/web", "ci@acme/web/x", "ci@/web"} {
		_, err := issue(wrong)
		require.Error(t, err, wrong)
		require.False(t, fault.Is(err, fault.NotFound), "%s: the refusal reveals which accounts exist: %v", wrong, err)
	}
	found, err := r.GetUser(w.admin(), &identityv1.GetUserRequest{Id: "ci@acme/web"})
	require.NoError(t, err)
	require.Equal(t, made.GetAccount().GetId(), found.GetId())
	list, err := r.ListBindings(bob, &identityv1.ListBindingsRequest{OrgId: "acme", ProjectId: "web"})
	require.NoError(t, err)
	var names []string
	for _, g := range list.GetGrants() {
		names = append(names, g.GetUsername())
	}
	require.Contains(t, names, "ci@acme/web")

	_, err = r.RevokeTokens(w.login("mallory"), &identityv1.RevokeTokensRequest{UserId: "ci@acme/web"})
	require.Error(t, err)
	require.False(t, fault.Is(err, fault.NotFound), "%v", err)
	require.Zero(t, w.first.Revocations(), "a refused call counts")
	_, err = r.RevokeTokens(w.admin(), &identityv1.RevokeTokensRequest{UserId: "ci@acme/web"})
	require.NoError(t, err)
	require.EqualValues(t, 1, w.first.Revocations())
	v, err = r.VerifyToken(t.Context(), &identityv1.VerifyTokenRequest{Token: token.GetToken()})
	require.NoError(t, err)
	require.False(t, v.GetValid())
	_, err = r.ListAuditRecords(bob, &identityv1.ListAuditRecordsRequest{OrgId: "acme", Principal: "ci@acme/web"})
	require.NoError(t, err)
	_, err = r.ListAuditRecords(w.login("mallory"), &identityv1.ListAuditRecordsRequest{OrgId: "evil", Principal: "ci@acme/web"})
	require.True(t, fault.Is(err, fault.NotFound), "an org:admin finds accounts of its own org only: %v", err)
}

package identity

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestUpdateDisplayNames changes the display names of an org, a project, a group and a user. It checks that the user's
// token, roles and groups stay valid, that a repetition writes nothing, and that an empty name is the ID.
func TestUpdateDisplayNames(t *testing.T) {
	w, r := newTwoOrgs(t)
	bob := w.login("bob") // org:admin
	w.groupOf(bob, "devs", "ada")
	shop := cloud.Binding{Role: cloud.ProjectMember, Org: "acme", Project: "shop"}
	w.place(shop)
	require.NoError(t, w.bindGroup(bob, "devs", shop))
	text := w.token(w.first, tokenRequest{User: "ada", Password: secret})

	name := proto.String("Acme Corp.")
	before := w.engine.Revision()
	for range 2 {
		org, err := r.UpdateOrg(bob, &identityv1.UpdateOrgRequest{Id: "acme", Name: name})
		require.NoError(t, err)
		require.Equal(t, "Acme Corp.", org.GetName())
		project, err := r.UpdateProject(bob, &identityv1.UpdateProjectRequest{Id: "web", OrgId: "acme", Name: name})
		require.NoError(t, err)
		require.Equal(t, "Acme Corp.", project.GetName())
		group, err := r.UpdateGroup(bob, &identityv1.UpdateGroupRequest{OrgId: "acme", Id: "devs", Name: name})
		require.NoError(t, err)
		require.Equal(t, "Acme Corp.", group.GetName())
		require.Len(t, group.GetBindings(), 1)
		user, err := r.UpdateUser(w.admin(), &identityv1.UpdateUserRequest{UserId: "ada", Name: name})
		require.NoError(t, err)
		require.Equal(t, "Acme Corp.", user.GetName())
		require.Len(t, user.GetBindings(), 1)
		require.Equal(t, "devs", user.GetGroups()[0].GetGroupId())
	}
	require.Equal(t, before+4, w.engine.Revision(), "a repetition wrote a log entry")

	for _, project := range []string{"web", "shop"} {
		_, err := auth.Admit(w.as(w.first, text), getVM, "acme", project)
		require.NoError(t, err, "a token from before the changes lost its access to %s", project)
	}
	me, err := r.WhoAmI(w.as(w.first, text), &identityv1.WhoAmIRequest{})
	require.NoError(t, err)
	require.Equal(t, []string{"Acme Corp.", "Acme Corp."}, []string{me.GetPrincipalName(), me.GetGroups()[0].GetName()})

	org, err := r.UpdateOrg(bob, &identityv1.UpdateOrgRequest{Id: "acme"})
	require.NoError(t, err)
	require.Equal(t, "Acme Corp.", org.GetName(), "an absent name changes nothing")
	org, err = r.UpdateOrg(bob, &identityv1.UpdateOrgRequest{Id: "acme", Name: proto.String("")})
	require.NoError(t, err)
	require.Equal(t, "acme", org.GetName())
	got, err := r.GetOrg(bob, &identityv1.GetOrgRequest{Id: "acme"})
	require.NoError(t, err)
	require.Equal(t, "acme", got.GetName())
}

// TestRefusedUpdates checks who may not change a display name, and which names are refused.
func TestRefusedUpdates(t *testing.T) {
	w, r := newTwoOrgs(t)
	ada, bob, mallory := w.login("ada"), w.login("bob"), w.login("mallory")
	w.groupOf(bob, "devs")
	account, err := r.CreateServiceAccount(bob, &identityv1.CreateServiceAccountRequest{OrgId: "acme", ProjectId: "web", Name: "ci", Roles: []string{"project:viewer"}})
	require.NoError(t, err)
	name := proto.String("New")
	for says, c := range map[string]struct {
		err  error
		kind fault.Kind
	}{
		"a member renames the org":         {errOf(r.UpdateOrg(ada, &identityv1.UpdateOrgRequest{Id: "acme", Name: name})), fault.PermissionDenied},
		"another org's admin renames it":   {errOf(r.UpdateOrg(mallory, &identityv1.UpdateOrgRequest{Id: "acme", Name: name})), fault.PermissionDenied},
		"of no org, by another admin":      {errOf(r.UpdateOrg(mallory, &identityv1.UpdateOrgRequest{Id: "none", Name: name})), fault.PermissionDenied},
		"an org without an ID":             {errOf(r.UpdateOrg(w.admin(), &identityv1.UpdateOrgRequest{Name: name})), fault.InvalidArgument},
		"no such org":                      {errOf(r.UpdateOrg(w.admin(), &identityv1.UpdateOrgRequest{Id: "none", Name: name})), fault.NotFound},
		"an invisible character":           {errOf(r.UpdateOrg(bob, &identityv1.UpdateOrgRequest{Id: "acme", Name: proto.String("a\u200bb")})), fault.InvalidArgument},
		"a project of another org":         {errOf(r.UpdateProject(bob, &identityv1.UpdateProjectRequest{Id: "lair", OrgId: "acme", Name: name})), fault.NotFound},
		"a project of another org, unread": {errOf(r.UpdateProject(bob, &identityv1.UpdateProjectRequest{Id: "lair", OrgId: "acme"})), fault.NotFound},
		"a name that is too long":          {errOf(r.UpdateProject(bob, &identityv1.UpdateProjectRequest{Id: "web", OrgId: "acme", Name: proto.String(strings.Repeat("x", 257))})), fault.InvalidArgument},
		"no such group":                    {errOf(r.UpdateGroup(bob, &identityv1.UpdateGroupRequest{OrgId: "acme", Id: "none", Name: name})), fault.NotFound},
		"another org's group":              {errOf(r.UpdateGroup(mallory, &identityv1.UpdateGroupRequest{OrgId: "acme", Id: "devs", Name: name})), fault.PermissionDenied},
		"a user, by an org:admin":          {errOf(r.UpdateUser(bob, &identityv1.UpdateUserRequest{UserId: "ada", Name: name})), fault.PermissionDenied},
		"no such user":                     {errOf(r.UpdateUser(w.admin(), &identityv1.UpdateUserRequest{UserId: "none", Name: name})), fault.NotFound},
		"a service account as a user":      {errOf(r.UpdateUser(w.admin(), &identityv1.UpdateUserRequest{UserId: account.GetAccount().GetId(), Name: name})), fault.FailedPrecondition},
	} {
		require.True(t, fault.Is(c.err, c.kind), "%s: %v", says, c.err)
	}
	org, err := r.GetOrg(bob, &identityv1.GetOrgRequest{Id: "acme"})
	require.NoError(t, err)
	require.Equal(t, "acme", org.GetName())
}

// TestUpdateServiceAccount changes the roles, the end and the secret of a service account. A token has the new roles at
// once, and ends with the secret that it was issued for.
func TestUpdateServiceAccount(t *testing.T) {
	w, r := newTwoOrgs(t)
	bob := w.login("bob")
	made, err := r.CreateServiceAccount(bob, &identityv1.CreateServiceAccountRequest{OrgId: "acme", ProjectId: "web", Name: "ci", Roles: []string{"project:viewer"}})
	require.NoError(t, err)
	id := cloud.UserID(made.GetAccount().GetId())
	text := w.token(w.first, tokenRequest{User: id, Password: made.GetSecret()})
	may := func() bool {
		_, err := auth.Admit(w.as(w.first, text), createVM, "", "")
		return err == nil
	}
	require.False(t, may())
	update := func(change *identityv1.UpdateServiceAccountRequest) *identityv1.UpdateServiceAccountResponse {
		change.OrgId, change.ProjectId, change.Id = "acme", "web", "ci@acme/web"
		out, err := r.UpdateServiceAccount(bob, change)
		require.NoError(t, err)
		return out
	}

	out := update(&identityv1.UpdateServiceAccountRequest{Roles: []string{"project:member"}})
	require.Equal(t, []string{"project:member"}, out.GetAccount().GetRoles())
	require.Empty(t, out.GetSecret())
	require.True(t, may(), "the token of the account does not have the new role")
	before := w.engine.Revision()
	update(&identityv1.UpdateServiceAccountRequest{Roles: []string{"project:member"}})
	require.Equal(t, before, w.engine.Revision(), "a repetition wrote a log entry")

	ends := w.at.Add(time.Hour).UnixMilli()
	update(&identityv1.UpdateServiceAccountRequest{ExpiresAt: &ends})
	got, err := r.GetServiceAccount(bob, &identityv1.GetServiceAccountRequest{OrgId: "acme", ProjectId: "web", Id: string(id)})
	require.NoError(t, err)
	require.Equal(t, []any{"ci", ends, []string{"project:member"}}, []any{got.GetName(), got.GetExpiresAt(), got.GetRoles()})
	update(&identityv1.UpdateServiceAccountRequest{ExpiresAt: proto.Int64(0)})
	w.wait(2 * time.Hour)
	bob = w.login("bob")
	text = w.token(w.first, tokenRequest{User: id, Password: made.GetSecret()})
	require.True(t, may(), "the account ended")

	fresh := update(&identityv1.UpdateServiceAccountRequest{NewSecret: true})
	require.NotEmpty(t, fresh.GetSecret())
	require.NotEqual(t, made.GetSecret(), fresh.GetSecret())
	require.ErrorContains(t, errOf(w.first.Verify(t.Context(), text)), "no longer valid", "a token of the old secret")
	_, proven, err := w.first.token(t.Context(), tokenRequest{User: id, Password: made.GetSecret()})
	require.NoError(t, err)
	require.False(t, proven, "the old secret is accepted")
	text = w.token(w.first, tokenRequest{User: id, Password: fresh.GetSecret()})
	require.True(t, may())

	for says, c := range map[string]struct {
		change *identityv1.UpdateServiceAccountRequest
		by     string
		kind   fault.Kind
	}{
		"a role of the cloud":       {&identityv1.UpdateServiceAccountRequest{Id: string(id), Roles: []string{"system:admin"}}, "bob", fault.InvalidArgument},
		"a role twice":              {&identityv1.UpdateServiceAccountRequest{Id: string(id), Roles: []string{"project:viewer", "project:viewer"}}, "bob", fault.InvalidArgument},
		"an end in the past":        {&identityv1.UpdateServiceAccountRequest{Id: string(id), ExpiresAt: proto.Int64(1)}, "bob", fault.InvalidArgument},
		"no such account":           {&identityv1.UpdateServiceAccountRequest{Id: "TVNONE"}, "bob", fault.NotFound},
		"an account of no project":  {&identityv1.UpdateServiceAccountRequest{Id: "ci@evil/lair"}, "bob", fault.NotFound},
		"a user":                    {&identityv1.UpdateServiceAccountRequest{Id: "ada", Roles: []string{"project:admin"}}, "bob", fault.NotFound},
		"by a member":               {&identityv1.UpdateServiceAccountRequest{Id: string(id), NewSecret: true}, "ada", fault.PermissionDenied},
		"by another org's admin":    {&identityv1.UpdateServiceAccountRequest{Id: string(id), NewSecret: true}, "mallory", fault.NotFound},
		"read by a member":          {nil, "ada", fault.PermissionDenied},
		"read from another project": {nil, "mallory", fault.NotFound},
	} {
		if c.change == nil {
			err = errOf(r.GetServiceAccount(w.login(c.by), &identityv1.GetServiceAccountRequest{OrgId: "acme", ProjectId: "web", Id: string(id)}))
		} else {
			c.change.OrgId, c.change.ProjectId = "acme", "web"
			err = errOf(r.UpdateServiceAccount(w.login(c.by), c.change))
		}
		require.True(t, fault.Is(err, c.kind), "%s: %v", says, err)
	}
}

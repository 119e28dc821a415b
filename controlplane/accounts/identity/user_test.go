package identity

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestDisabledUserGetsNoToken checks that a disabled user gets no token for the correct password, until the user is
// enabled again.
func TestDisabledUserGetsNoToken(t *testing.T) {
	w := newWorld(t)
	r := &server{s: w.first}
	w.user("ada", member)
	login := func() error {
		return errOf(r.IssueToken(t.Context(), &identityv1.IssueTokenRequest{Username: "ada", Password: secret}))
	}
	require.NoError(t, login())
	require.NoError(t, errOf(r.DisableUser(w.admin(), &identityv1.DisableUserRequest{UserId: "ada"})))
	require.True(t, fault.Is(login(), fault.Unauthenticated), "a disabled user got a token")
	require.NoError(t, errOf(r.EnableUser(w.admin(), &identityv1.EnableUserRequest{UserId: "ada"})))
	require.NoError(t, login())
}

// TestUsersManageThemselves checks that users can set their own password only with the current one, and can give up
// roles that others gave them, but not remove roles of other users.
func TestUsersManageThemselves(t *testing.T) {
	w := newWorld(t)
	w.user("ada", member)
	w.user("eve", cloud.Binding{Role: cloud.ProjectAdmin, Org: "evil", Project: "lair"})
	r := &server{s: w.first}
	set := func(ctx context.Context, user, current string) error {
		return errOf(r.SetPassword(ctx, &identityv1.SetPasswordRequest{UserId: user, Password: "another one", CurrentPassword: current}))
	}
	for _, current := range []string{"", "guess guess"} {
		err := set(w.login("ada"), "ada", current)
		require.True(t, fault.Is(err, fault.PermissionDenied), "a token alone is not enough: %v", err)
	}
	require.NoError(t, set(w.login("ada"), "ada", secret))
	require.NoError(t, errOf(r.SetPassword(w.admin(), &identityv1.SetPasswordRequest{UserId: "ada", Password: secret})))
	scoped := w.as(w.first, w.hostToken(tenant.Default))
	require.True(t, fault.Is(set(scoped, "ada", ""), fault.PermissionDenied), "an administrator's token of a project rules that project")

	lair := cloud.Binding{Role: cloud.ProjectMember, Org: "evil", Project: "lair"}
	require.NoError(t, errOf(r.BindRole(w.login("eve"), &identityv1.BindRoleRequest{UserId: "ada", Binding: oneOnWire(lair)})))
	require.NoError(t, errOf(r.AcceptInvitation(w.login("ada"), &identityv1.AcceptInvitationRequest{Binding: oneOnWire(lair)})))
	at, err := auth.Admit(w.login("ada"), "/vmcontroller.v1.VmService/GetVm", "evil", "lair")
	require.NoError(t, err)
	require.Equal(t, cloud.Tenant{Org: "evil", Project: "lair"}, at)
	require.NoError(t, errOf(r.UnbindRole(w.login("ada"), &identityv1.UnbindRoleRequest{UserId: "ada", Binding: oneOnWire(lair)})))
	_, err = auth.Admit(w.login("ada"), "/vmcontroller.v1.VmService/GetVm", "evil", "lair")
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	err = errOf(r.UnbindRole(w.login("ada"), &identityv1.UnbindRoleRequest{UserId: "eve", Binding: oneOnWire(cloud.Binding{Role: cloud.ProjectAdmin, Org: "evil", Project: "lair"})}))
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
}

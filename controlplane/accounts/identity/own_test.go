package identity

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/budget"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestUnbindInForeignProjectSpendsNoBudget checks that UnbindRole calls of a user in a project or org where the user
// has no role are refused without spending that org's budget of changes.
func TestUnbindInForeignProjectSpendsNoBudget(t *testing.T) {
	w, r := newTwoOrgs(t)
	limits := budget.New(budget.Limits{CallsPerSecond: 1, CallsBurst: 20}, func() time.Duration { return 0 })
	w.first.opts.Commands.SetGate(limits.Admit)
	mallory := w.token(w.first, tokenRequest{User: "mallory", Password: secret})
	var err error
	for _, b := range []cloud.Binding{web, acme} {
		for range 100 {
			err = errOf(r.UnbindRole(w.as(w.first, mallory), &identityv1.UnbindRoleRequest{UserId: "mallory", Binding: oneOnWire(b)}))
		}
	}
	require.NoError(t, w.grant(w.login("bob"), "ada", web))
	require.NoError(t, w.grant(w.login("bob"), "ada", cloud.Binding{Role: cloud.ProjectViewer, Org: "acme", Project: "web"}))
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
}

// TestScopedTokenUnbindsOnlyWithinItsScope checks that with a token limited to an org or project a user can neither
// give up roles outside of it nor accept or decline invitations.
func TestScopedTokenUnbindsOnlyWithinItsScope(t *testing.T) {
	w, r := newTwoOrgs(t)
	mallory := w.login("mallory")
	other := cloud.Binding{Role: cloud.ProjectMember, Org: "evil", Project: "lair"}
	for _, b := range []cloud.Binding{lair, other} {
		require.NoError(t, w.grant(mallory, "ada", b))
	}
	require.NoError(t, errOf(r.AcceptInvitation(w.login("ada"), &identityv1.AcceptInvitationRequest{Binding: oneOnWire(lair)})))
	inLairOnly := w.as(w.first, w.token(w.first, tokenRequest{User: "ada", Password: secret, Org: "evil", Project: "lair"}))
	err := errOf(r.UnbindRole(inLairOnly, &identityv1.UnbindRoleRequest{UserId: "ada", Binding: oneOnWire(web)}))
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
	f, _ := fault.From(err)
	require.Equal(t, auth.TokenScope, f.Reason)
	err = errOf(r.UnbindRole(inLairOnly, &identityv1.UnbindRoleRequest{UserId: "ada", Binding: oneOnWire(cloud.Binding{Role: cloud.BillingAdmin})}))
	require.True(t, fault.Is(err, fault.PermissionDenied), "a role in the whole cloud: %v", err)
	err = errOf(r.DeclineInvitation(inLairOnly, &identityv1.DeclineInvitationRequest{Binding: oneOnWire(other)}))
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
	at, err := auth.Admit(w.login("ada"), getVM, "acme", "web")
	require.NoError(t, err)
	require.Equal(t, inWeb, at)
	require.Equal(t, []cloud.Binding{other}, w.invitations("ada"))

	require.NoError(t, errOf(r.UnbindRole(inLairOnly, &identityv1.UnbindRoleRequest{UserId: "ada", Binding: oneOnWire(lair)})))
	_, err = auth.Admit(w.login("ada"), getVM, "evil", "lair")
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
}

// TestRolesInDeletedProjectsDoNotCount checks that roles in deleted projects do not count toward the limit of a user's
// roles in one org (maxPerOrg).
func TestRolesInDeletedProjectsDoNotCount(t *testing.T) {
	w, r := newTwoOrgs(t)
	bob := w.login("bob")
	for range 70 {
		job := cloud.Binding{Role: cloud.ProjectMember, Org: "acme", Project: "job"}
		w.place(job)
		require.NoError(t, w.grant(bob, "ada", job))
		require.NoError(t, w.grant(bob, "ada", cloud.Binding{Role: cloud.ProjectViewer, Org: "acme", Project: "job"}))
		require.NoError(t, errOf(r.DeleteProject(w.admin(), &identityv1.DeleteProjectRequest{Id: "job"})))
	}
	for i := range 70 {
		job := cloud.Binding{Role: cloud.ProjectMember, Org: "acme", Project: cloud.ProjectID(fmt.Sprint("job-", i))}
		w.place(job)
		require.NoError(t, w.grant(bob, "ada", job), "project %d", i)
		require.NoError(t, errOf(r.DeleteProject(w.admin(), &identityv1.DeleteProjectRequest{Id: string(job.Project)})))
	}
	at, err := w.tenantOfCall(w.token(w.first, tokenRequest{User: "ada", Password: secret}), getVM)
	require.NoError(t, err)
	require.Equal(t, inWeb, at)
}

// TestRevokedDevTokensAreNotCounted checks that revoking many tokens issued under --dev in a user's name, which need no
// password, does not revoke the user's other tokens.
func TestRevokedDevTokensAreNotCounted(t *testing.T) {
	w := newWorld(t)
	dev := w.member(0, true)
	w.user("ada", member)
	real := w.token(dev, tokenRequest{User: "ada", Password: secret})
	for range maxDenials + 1 {
		w.wait(tokenEvery)
		text := w.token(dev, tokenRequest{User: "ada"})
		require.NoError(t, errOf((&server{s: dev}).RevokeToken(w.as(dev, text), &identityv1.RevokeTokenRequest{Token: text})))
	}
	_, err := dev.Verify(t.Context(), real)
	require.NoError(t, err)
	require.Zero(t, w.denials())
}

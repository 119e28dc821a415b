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

// A user who asks to give up roles in a project where they have none does not use up that project's budget of changes.
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

// With a token that is limited to an org or a project a user cannot give up roles outside of it, nor answer
// invitations.
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

// Roles in deleted projects do not count for the limit of a user's roles in an org.
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

// Under --dev, where anybody has a token in any name, revoking such tokens does not end the tokens of the user of that
// name.
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

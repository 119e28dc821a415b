package identity

import (
	"context"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const (
	getVM      auth.Method = "/vmcontroller.v1.VmService/GetVm"
	listImages auth.Method = "/vmcontroller.v1.ImageService/ListImages"
)

var (
	web    = cloud.Binding{Role: cloud.ProjectMember, Org: "acme", Project: "web"}
	acme   = cloud.Binding{Role: cloud.OrgAdmin, Org: "acme"}
	evil   = cloud.Binding{Role: cloud.OrgAdmin, Org: "evil"}
	lair   = cloud.Binding{Role: cloud.ProjectViewer, Org: "evil", Project: "lair"}
	inWeb  = cloud.Tenant{Org: "acme", Project: "web"}
	inLair = cloud.Tenant{Org: "evil", Project: "lair"}
)

// newTwoOrgs returns a world with two orgs and a service: ada has a role in acme's project web, bob is org:admin of
// acme, mallory is org:admin of evil.
func newTwoOrgs(t *testing.T) (*world, *server) {
	w := newWorld(t)
	w.place(lair)
	w.user("ada", web)
	w.user("bob", acme)
	w.user("mallory", evil)
	return w, &server{s: w.first}
}

// grant calls BindRole in the context by, which contains the caller, to give user the role b.
func (w *world) grant(by context.Context, user string, b cloud.Binding) error {
	return errOf((&server{s: w.first}).BindRole(by, &identityv1.BindRoleRequest{UserId: user, Binding: oneOnWire(b)}))
}

// tenantOfCall returns the tenant that package auth chooses for a call of method m with the token text, if the call
// names no tenant.
func (w *world) tenantOfCall(text string, m auth.Method) (cloud.Tenant, error) {
	return auth.Admit(w.as(w.first, text), m, "", "")
}

// bindings returns the grants that ListBindings returns for an org, each as "<user> <role> <project>". Invitations
// begin with "pending".
func (w *world) bindings(by context.Context, org string) (all []string) {
	q := &identityv1.ListBindingsRequest{OrgId: org}
	for {
		page, err := (&server{s: w.first}).ListBindings(by, q)
		require.NoError(w.t, err)
		for _, g := range page.GetGrants() {
			text := fmt.Sprint(g.GetUserId(), " ", g.GetBinding().GetRole(), " ", g.GetBinding().GetProjectId())
			if g.GetPending() {
				text = "pending " + text
				require.NotZero(w.t, g.GetExpiresAt())
			}
			all = append(all, text)
		}
		if q.PageToken = page.GetNextPageToken(); q.PageToken == "" {
			return all
		}
	}
}

func (w *world) invitations(user string) (all []cloud.Binding) {
	page, err := (&server{s: w.first}).ListInvitations(w.login(user), &identityv1.ListInvitationsRequest{})
	require.NoError(w.t, err)
	for _, i := range page.GetInvitations() {
		all = append(all, bindingFrom(i.GetBinding()))
	}
	return all
}

// TestGrantByAnotherOrgNeedsConsent checks that a role given by another org changes neither the default tenant of a
// user's calls nor which calls are allowed, until the user accepts the invitation.
func TestGrantByAnotherOrgNeedsConsent(t *testing.T) {
	w, r := newTwoOrgs(t)
	ada, bob := w.token(w.first, tokenRequest{User: "ada", Password: secret}), w.token(w.first, tokenRequest{User: "bob", Password: secret})
	mallory := w.login("mallory")
	unchanged := func() {
		t.Helper()
		at, err := w.tenantOfCall(ada, getVM)
		require.NoError(t, err)
		require.Equal(t, inWeb, at)
		_, err = w.tenantOfCall(bob, getVM)
		require.True(t, fault.Is(err, fault.PermissionDenied), "bob has no role in a project, so a project of org evil must not become his default: %v", err)
		at, err = w.tenantOfCall(bob, listImages)
		require.NoError(t, err)
		require.Equal(t, cloud.Tenant{Org: "acme"}, at)
		for _, text := range []string{ada, bob} {
			require.Len(t, auth.CallerOf(w.as(w.first, text)).Bindings, 1, "the bindings of a call contain no invitations")
			_, err := auth.Admit(w.as(w.first, text), getVM, "evil", "lair")
			require.True(t, fault.Is(err, fault.NotFound), "%v", err)
		}
	}
	unchanged()
	require.NoError(t, w.grant(mallory, "ada", lair))
	require.NoError(t, w.grant(mallory, "bob", lair))
	require.NoError(t, w.grant(mallory, "bob", evil))
	unchanged()
	require.Equal(t, []cloud.Binding{lair}, w.invitations("ada"))
	require.Equal(t, []string{"mallory org:admin ", "pending ada project:viewer lair", "pending bob project:viewer lair", "pending bob org:admin "}, w.bindings(mallory, "evil"))

	require.Subset(t, w.bindings(w.admin(), ""), []string{"bob org:admin ", "pending ada project:viewer lair"}, "the administrator's list must contain the grants of all orgs")
	within, err := r.ListBindings(mallory, &identityv1.ListBindingsRequest{OrgId: "evil", ProjectId: "lair"})
	require.NoError(t, err)
	require.Len(t, within.GetGrants(), 2, "the list for a project must contain only its grants")
	for size := int32(1); size < 3; size++ {
		var paged []*identityv1.Grant
		q := &identityv1.ListBindingsRequest{PageSize: size}
		for more := true; more; more = q.PageToken != "" {
			page, err := r.ListBindings(w.admin(), q)
			require.NoError(t, err)
			paged, q.PageToken = append(paged, page.GetGrants()...), page.GetNextPageToken()
		}
		require.Len(t, paged, 7, "all pages together must contain four roles and three invitations")
	}

	require.NoError(t, errOf(r.DeclineInvitation(w.login("ada"), &identityv1.DeclineInvitationRequest{Binding: oneOnWire(lair)})))
	require.Empty(t, w.invitations("ada"))
	require.NoError(t, w.grant(mallory, "ada", lair))
	require.Empty(t, w.invitations("ada"), "a declined invitation is not offered again")
	require.Len(t, w.bindings(mallory, "evil"), 4, "the list for the inviting org must not show whether the user declined")
	err = errOf(r.AcceptInvitation(w.login("ada"), &identityv1.AcceptInvitationRequest{Binding: oneOnWire(lair)}))
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	require.NoError(t, errOf(r.UnbindRole(mallory, &identityv1.UnbindRoleRequest{UserId: "bob", Binding: oneOnWire(evil)})))
	require.Equal(t, []cloud.Binding{lair}, w.invitations("bob"), "the other invitation was withdrawn")
	unchanged()

	require.NoError(t, errOf(r.AcceptInvitation(w.login("bob"), &identityv1.AcceptInvitationRequest{Binding: oneOnWire(lair)})))
	require.NoError(t, errOf(r.AcceptInvitation(w.login("bob"), &identityv1.AcceptInvitationRequest{Binding: oneOnWire(lair)})), "an invitation can be accepted again")
	at, err := w.tenantOfCall(bob, getVM)
	require.NoError(t, err)
	require.Equal(t, inLair, at, "the default must be the only project in which bob has a role")
	at, err = w.tenantOfCall(bob, listImages)
	require.NoError(t, err)
	require.Equal(t, cloud.Tenant{Org: "acme"}, at)
	require.Contains(t, w.bindings(mallory, "evil"), "bob project:viewer lair")
}

// TestAddedRoleKeepsTheDefaultTenant checks that calls with an existing token keep their default tenant when any
// administrator adds a role, and that they lose it when the role in that tenant is removed.
func TestAddedRoleKeepsTheDefaultTenant(t *testing.T) {
	w, r := newTwoOrgs(t)
	shop := cloud.Binding{Role: cloud.ProjectAdmin, Org: "acme", Project: "shop"}
	w.place(shop)
	text := w.token(w.first, tokenRequest{User: "ada", Password: secret})
	narrow := w.token(w.first, tokenRequest{User: "ada", Password: secret, Org: "acme"})
	for _, b := range []cloud.Binding{shop, lair, evil, {Role: cloud.BillingAdmin}} {
		require.NoError(t, w.bind("ada", b))
		for _, token := range []string{text, narrow} {
			at, err := w.tenantOfCall(token, getVM)
			require.NoError(t, err)
			require.Equal(t, inWeb, at)
		}
		at, err := w.tenantOfCall(text, listImages)
		require.NoError(t, err)
		require.Equal(t, cloud.Tenant{Org: "acme"}, at)
	}
	at, err := auth.Admit(w.as(w.first, text), getVM, "", "shop")
	require.NoError(t, err, "the call names a project")
	require.Equal(t, cloud.Tenant{Org: "acme", Project: "shop"}, at)

	require.NoError(t, errOf(r.UnbindRole(w.admin(), &identityv1.UnbindRoleRequest{UserId: "ada", Binding: oneOnWire(web)})))
	_, err = w.tenantOfCall(text, getVM)
	require.ErrorContains(t, err, "several projects")
	require.ErrorContains(t, err, "acme/shop, evil/lair")
	require.NoError(t, errOf(r.DeleteProject(w.admin(), &identityv1.DeleteProjectRequest{Id: "lair"})))
	at, err = w.tenantOfCall(text, getVM)
	require.NoError(t, err)
	require.Equal(t, cloud.Tenant{Org: "acme", Project: "shop"}, at)
	require.NoError(t, w.bind("ada", web))
	at, err = w.tenantOfCall(text, getVM)
	require.NoError(t, err)
	require.Equal(t, cloud.Tenant{Org: "acme", Project: "shop"}, at, "the project that was the only one stays the default")
}

// TestGrantsDoNotRevealUsers checks that the responses and lists that an org gets about a user of another org are the
// same whether that user exists or not, can log in, is disabled, or is a service account.
func TestGrantsDoNotRevealUsers(t *testing.T) {
	w, r := newTwoOrgs(t)
	admin, mallory := w.admin(), w.login("mallory")
	require.NoError(t, errOf(r.CreateUser(admin, &identityv1.CreateUserRequest{Id: "bare"})))
	require.NoError(t, errOf(r.CreateUser(admin, &identityv1.CreateUserRequest{Id: "homely", OrgId: "acme"})))
	w.user("shut", web)
	require.NoError(t, errOf(r.DisableUser(admin, &identityv1.DisableUserRequest{UserId: "shut"})))
	account, err := r.CreateServiceAccount(admin, &identityv1.CreateServiceAccountRequest{OrgId: "acme", ProjectId: "web", Name: "ci", Roles: []string{"project:viewer"}})
	require.NoError(t, err)
	names := []string{"ada", "bare", "homely", "shut", "admin", account.GetAccount().GetId(), "nobody"}
	seen := func(user string) (results []string) {
		say := func(err error) { results = append(results, strings.ReplaceAll(fmt.Sprint(err), " "+user+" ", " X ")) }
		shown := func() {
			for _, g := range w.bindings(mallory, "evil") {
				if strings.Contains(g, " "+user+" ") {
					results = append(results, strings.ReplaceAll(g, " "+user+" ", " X "))
				}
			}
		}
		for _, b := range []cloud.Binding{lair, lair, evil, {Role: cloud.ProjectViewer, Org: "evil", Project: "none"}, {Role: cloud.ProjectViewer, Org: "acme", Project: "web"}} {
			say(w.grant(mallory, user, b))
		}
		shown()
		for _, b := range []cloud.Binding{evil, {Role: cloud.ProjectMember, Org: "evil", Project: "lair"}} {
			say(errOf(r.UnbindRole(mallory, &identityv1.UnbindRoleRequest{UserId: user, Binding: oneOnWire(b)})))
		}
		shown()
		return results
	}
	want := seen("ghost")
	require.Equal(t, []string{"<nil>", "<nil>", "<nil>", "no project none", want[4], "pending X project:viewer lair", "pending X org:admin ", "<nil>", "<nil>",
		"pending X project:viewer lair"}, want)
	for _, name := range names {
		require.Equal(t, want, seen(name), name)
	}
	// A user created later sees the invitation to the name. If the user is deleted and created again, the invitation is
	// hidden from the user, but still listed for the org.
	w.user("ghost")
	require.Equal(t, []cloud.Binding{lair}, w.invitations("ghost"))
	require.NoError(t, errOf(r.DeleteUser(admin, &identityv1.DeleteUserRequest{UserId: "ghost"})))
	w.user("ghost")
	require.Empty(t, w.invitations("ghost"), "the invitation was for an earlier user of that name")
	require.Contains(t, w.bindings(mallory, "evil"), "pending ghost project:viewer lair")
}

// TestInvitationsDoNotCountForLimits checks that invitations count neither as roles of the user nor toward the limits
// of other orgs, and that they expire.
func TestInvitationsDoNotCountForLimits(t *testing.T) {
	w, r := newTwoOrgs(t)
	mallory := w.login("mallory")
	many := uint64(1000)
	require.NoError(t, errOf(r.SetQuota(w.admin(), &identityv1.SetQuotaRequest{OrgId: "evil", Quota: &identityv1.Quota{Projects: &many}})))
	refused := 0
	for i := range 300 {
		b := cloud.Binding{Role: cloud.ProjectViewer, Org: "evil", Project: cloud.ProjectID(fmt.Sprintf("evil-%d", i))}
		require.NoError(t, errOf(r.CreateProject(mallory, &identityv1.CreateProjectRequest{Id: string(b.Project), OrgId: "evil"})))
		if err := w.grant(mallory, "ada", b); err != nil {
			require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
			refused++
		}
	}
	require.Equal(t, 292, refused)
	require.Len(t, w.invitations("ada"), 8)
	shop := cloud.Binding{Role: cloud.ProjectMember, Org: "acme", Project: "shop"}
	w.place(shop)
	require.NoError(t, w.bind("ada", shop), "the administrator can give the role at once")
	require.NoError(t, w.grant(w.login("bob"), "ada", cloud.Binding{Role: cloud.ProjectViewer, Org: "acme", Project: "shop"}), "the home org can give the role at once")
	require.Len(t, auth.CallerOf(w.login("ada")).Bindings, 3)
	rival := cloud.Binding{Role: cloud.OrgAdmin, Org: "rival"}
	w.user("rob", rival)
	require.NoError(t, w.grant(w.login("rob"), "ada", rival), "another org can invite the user")
	require.Len(t, w.invitations("ada"), 9)

	// An org can have open invitations to maxInvitees (1000) users, and not to one more.
	_, err := w.first.opts.Store.Update(t.Context(), func(tx *store.Tx) error {
		for i := range 999 {
			if _, err := principal.Bind(tx, principal.Grant{User: cloud.UserID(fmt.Sprintf("name-%d", i)), Binding: lair, By: "mallory"}); err != nil {
				return err
			}
		}
		return nil
	})
	require.NoError(t, err)
	require.ErrorContains(t, w.grant(mallory, "one-more", lair), "org evil has open invitations to 1000 users")
	require.NoError(t, w.grant(w.login("rob"), "one-more", rival))

	w.wait(30 * 24 * time.Hour)
	require.Empty(t, w.invitations("ada"))
	require.NotContains(t, strings.Join(w.bindings(w.login("mallory"), "evil"), "\n"), "pending")
	require.NoError(t, w.first.Tend(t.Context()))
	require.NoError(t, w.grant(w.login("mallory"), "one-more", lair), "the limit is no longer reached")
	require.Equal(t, []string{"mallory org:admin ", "pending one-more project:viewer lair"}, w.bindings(w.login("mallory"), "evil"))
	require.NoError(t, errOf(r.DeleteProject(w.admin(), &identityv1.DeleteProjectRequest{Id: "lair"})))
	require.Equal(t, []string{"mallory org:admin "}, w.bindings(w.login("mallory"), "evil"), "invitations are removed with their project")
}

// TestRolesAreBoundedPerOrg checks that a user can have at most maxPerOrg roles of one org, that a user with
// maxBindings roles can accept no invitation, and that the home org can give a role in spite of these limits.
func TestRolesAreBoundedPerOrg(t *testing.T) {
	w, _ := newTwoOrgs(t)
	give := func(org string, n int) (err error) {
		_, err = w.first.opts.Store.Update(t.Context(), func(tx *store.Tx) error {
			for i := range n {
				b := cloud.Binding{Role: cloud.ProjectViewer, Org: cloud.OrgID(org), Project: cloud.ProjectID(fmt.Sprintf("%s-%d", org, i))}
				if _, err := principal.Bind(tx, principal.Grant{User: "ada", Binding: b, Always: true}); err != nil {
					return err
				}
			}
			return nil
		})
		return err
	}
	for _, org := range []string{"o1", "o2", "o3", "o4", "acme"} {
		for i := range 65 {
			w.place(cloud.Binding{Org: cloud.OrgID(org), Project: cloud.ProjectID(fmt.Sprintf("%s-%d", org, i))})
		}
	}
	require.ErrorContains(t, give("o1", 65), "user ada has 64 roles in org o1")
	for _, org := range []string{"o1", "o2", "o3"} {
		require.NoError(t, give(org, 64))
	}
	require.NoError(t, give("o4", 63))
	require.NoError(t, w.grant(w.login("mallory"), "ada", lair))
	err := errOf((&server{s: w.first}).AcceptInvitation(w.login("ada"), &identityv1.AcceptInvitationRequest{Binding: oneOnWire(lair)}))
	require.ErrorContains(t, err, "ada has 256 roles")
	require.NoError(t, give("acme", 63), "roles of other orgs must not count toward the limit of the home org")
}

// TestHomeOrgGrantsAtOnce checks that roles given by a user's home org are effective at once, and that roles given by
// another org need the user's acceptance.
func TestHomeOrgGrantsAtOnce(t *testing.T) {
	w, r := newTwoOrgs(t)
	home := func(user string) string {
		u, err := r.GetUser(w.admin(), &identityv1.GetUserRequest{Id: user})
		require.NoError(t, err)
		return u.GetOrgId()
	}
	require.Equal(t, []string{"acme", "acme", "evil", ""}, []string{home("ada"), home("bob"), home("mallory"), home("admin")})
	require.NoError(t, errOf(r.CreateUser(w.admin(), &identityv1.CreateUserRequest{Id: "carol", OrgId: "acme"})))
	require.True(t, fault.Is(errOf(r.CreateUser(w.admin(), &identityv1.CreateUserRequest{Id: "x", OrgId: "none"})), fault.NotFound))
	err := w.grant(w.login("bob"), "carol", web)
	require.True(t, fault.Is(err, fault.FailedPrecondition), "bob may know that carol of acme has no password: %v", err)
	require.NoError(t, errOf(r.SetPassword(w.admin(), &identityv1.SetPasswordRequest{UserId: "carol", Password: secret})))
	require.NoError(t, w.grant(w.login("bob"), "carol", web))
	at, err := w.tenantOfCall(w.token(w.first, tokenRequest{User: "carol", Password: secret}), getVM)
	require.NoError(t, err)
	require.Equal(t, inWeb, at)

	w.user("free")
	require.NoError(t, w.grant(w.login("mallory"), "free", lair))
	require.NoError(t, errOf(r.AcceptInvitation(w.login("free"), &identityv1.AcceptInvitationRequest{Binding: oneOnWire(lair)})))
	require.Empty(t, home("free"), "accepting an invitation does not change the home org")
	require.NoError(t, w.grant(w.login("mallory"), "free", evil))
	require.Len(t, auth.CallerOf(w.login("free")).Bindings, 1)
}

// TestOldUsersHaveAHomeOrg checks that a user record without a home org, as earlier versions wrote it, has as home org
// the only org in which the user has roles.
func TestOldUsersHaveAHomeOrg(t *testing.T) {
	w, r := newTwoOrgs(t)
	old := func(id string, roles ...cloud.Binding) {
		w.user(id)
		_, err := w.first.opts.Store.Update(t.Context(), func(tx *store.Tx) error {
			u, err := principal.Users.Get(tx, id)
			if err != nil {
				return err
			}
			u.HomeSettled, u.Bindings = false, slices.Clone(roles)
			for i, b := range roles {
				p, err := tenant.Find(tx, b.Project)
				if err != nil {
					return err
				}
				u.Bindings[i].Incarnation = p.Incarnation
			}
			principal.Users.Put(tx, u, id)
			return nil
		})
		require.NoError(t, err)
	}
	old("one", web)
	old("both", web, lair)
	for user, want := range map[string]int{"one": 2, "both": 2} {
		require.NoError(t, w.grant(w.login("bob"), user, acme))
		require.Len(t, auth.CallerOf(w.login(user)).Bindings, want, user)
	}
	require.Equal(t, []cloud.Binding{acme}, w.invitations("both"), "a user with roles in two orgs has no home org")
	require.NoError(t, w.bind("both", web), "the administrator can give the same role again")
	u, err := r.GetUser(w.admin(), &identityv1.GetUserRequest{Id: "both"})
	require.NoError(t, err)
	require.Equal(t, "acme", u.GetOrgId())

	text := w.token(w.first, tokenRequest{User: "one", Password: secret})
	require.NoError(t, w.bind("one", lair))
	at, err := w.tenantOfCall(text, getVM)
	require.NoError(t, err)
	require.Equal(t, inWeb, at, "the only project of the user must become the default")
}

// TestTokensForForeignProjects checks that IssueToken refuses a token for a tenant in which the user has no role, and
// that the wire contract's endpoint issues one with which every call is refused. No response may reveal whether the
// project exists, or its org.
func TestTokensForForeignProjects(t *testing.T) {
	w, r := newTwoOrgs(t)
	for _, q := range []cloud.Tenant{{Project: "web"}, {Org: "acme", Project: "web"}, {Org: "evil", Project: "web"}, {Org: "acme"}} {
		none := q
		if q.Project != "" {
			none.Project = "none"
		}
		if q.Org == "acme" {
			none.Org = "none"
		}
		issue := func(at cloud.Tenant) string {
			err := errOf(r.IssueToken(t.Context(), &identityv1.IssueTokenRequest{Username: "mallory", Password: secret, OrgId: string(at.Org), ProjectId: string(at.Project)}))
			require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
			return err.Error()
		}
		known, unknown := issue(q), issue(none)
		for _, word := range []string{"web", "acme"} {
			known, unknown = strings.ReplaceAll(known, word, "none"), strings.ReplaceAll(unknown, word, "none")
		}
		require.Equal(t, known, unknown)

		text := w.token(w.first, tokenRequest{User: "mallory", Password: secret, Org: string(q.Org), Project: string(q.Project)})
		me, err := r.WhoAmI(w.as(w.first, text), &identityv1.WhoAmIRequest{})
		require.NoError(t, err)
		if q.Org != "acme" {
			require.NotContains(t, me.String(), "acme")
			claims, err := base64.RawURLEncoding.DecodeString(strings.Split(text, ".")[1])
			require.NoError(t, err)
			require.NotContains(t, string(claims), "acme", "the token must not contain the ID of the project's org")
		}
		for _, m := range []auth.Method{getVM, listImages, "/credit.v1.CreditService/GetWallet"} {
			_, err = w.tenantOfCall(text, m)
			require.True(t, fault.Is(err, fault.NotFound), "%s: %v", m, err)
			require.False(t, strings.Contains(err.Error(), "acme") && q.Org == "", "%v", err)
		}
	}
	made, err := r.IssueToken(t.Context(), &identityv1.IssueTokenRequest{Username: "mallory", Password: secret, ProjectId: "lair"})
	require.NoError(t, err)
	require.Equal(t, inLair, cloud.Tenant{Org: cloud.OrgID(made.GetOrgId()), Project: cloud.ProjectID(made.GetProjectId())})
	err = errOf(r.CreateProject(w.login("mallory"), &identityv1.CreateProjectRequest{Id: "web", OrgId: "evil"}))
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)
	require.NotContains(t, err.Error(), "acme", "the error must not contain the org whose project has this ID")
}

// TestOrgAdminActsInProjects checks that an org:admin can create VMs in the org's projects, and create and delete
// projects, with one token.
func TestOrgAdminActsInProjects(t *testing.T) {
	w, r := newTwoOrgs(t)
	text := w.token(w.first, tokenRequest{User: "bob", Password: secret})
	for _, token := range []string{text, w.token(w.first, tokenRequest{User: "bob", Password: secret, Org: "acme"})} {
		for _, at := range []cloud.Tenant{{Project: "web"}, inWeb} {
			got, err := auth.Admit(w.as(w.first, token), "/vmcontroller.v1.VmService/CreateVm", string(at.Org), string(at.Project))
			require.NoError(t, err)
			require.Equal(t, inWeb, got)
		}
		_, err := w.tenantOfCall(token, getVM)
		require.ErrorContains(t, err, "to a project of org acme")
		for _, at := range []cloud.Tenant{{Project: "lair"}, {Project: "none"}} {
			_, err = auth.Admit(w.as(w.first, token), getVM, string(at.Org), string(at.Project))
			require.EqualError(t, err, fmt.Sprintf("no project %s: it does not exist, or bob has no role in it", at.Project))
		}
	}
	// A project that was just created on another member is found too.
	require.NoError(t, errOf(r.CreateProject(w.as(w.first, text), &identityv1.CreateProjectRequest{Id: "fresh", OrgId: "acme"})))
	at, err := auth.Admit(w.as(w.member(0, false), text), getVM, "", "fresh")
	require.NoError(t, err)
	require.Equal(t, cloud.Tenant{Org: "acme", Project: "fresh"}, at)
	require.NoError(t, errOf(r.DeleteProject(w.as(w.first, text), &identityv1.DeleteProjectRequest{Id: "fresh", OrgId: "acme"})))
	_, err = auth.Admit(w.as(w.first, text), getVM, "acme", "fresh")
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
}

// TestAcceptRequiresAnUnscopedToken checks that AcceptInvitation is refused with a token that is limited to an org or
// project, is issued under --dev, or is a service account's.
func TestAcceptRequiresAnUnscopedToken(t *testing.T) {
	w, r := newTwoOrgs(t)
	require.NoError(t, w.grant(w.login("mallory"), "ada", lair))
	accept := func(ctx context.Context) error {
		return errOf(r.AcceptInvitation(ctx, &identityv1.AcceptInvitationRequest{Binding: oneOnWire(lair)}))
	}
	dev := w.member(0, true)
	account, err := r.CreateServiceAccount(w.admin(), &identityv1.CreateServiceAccountRequest{OrgId: "acme", ProjectId: "web", Name: "ci", Roles: []string{"project:viewer"}})
	require.NoError(t, err)
	for name, ctx := range map[string]context.Context{
		"an unauthenticated token":     w.as(w.first, w.token(w.first, tokenRequest{User: "ada"})),
		"a token issued under --dev":   w.as(dev, w.token(dev, tokenRequest{User: "ada"})),
		"a token limited to a project": w.as(w.first, w.token(w.first, tokenRequest{User: "ada", Password: secret, Project: "web"})),
		"a service account":            w.as(w.first, w.token(w.first, tokenRequest{User: cloud.UserID(account.GetAccount().GetId()), Password: account.GetSecret()})),
	} {
		err := accept(ctx)
		require.True(t, fault.Is(err, fault.PermissionDenied), "%s: %v", name, err)
	}
	require.True(t, fault.Is(accept(w.login("bob")), fault.NotFound), "a user must not accept another user's invitation")
	require.NoError(t, accept(w.login("ada")))
	require.True(t, slices.ContainsFunc(auth.CallerOf(w.login("ada")).Bindings, lair.Same))
}

package identity

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const createVM = "/vmcontroller.v1.VmService/CreateVm"

// recreate deletes the project web of org acme, and creates it again with the same ID.
func (w *world) recreate() {
	w.t.Helper()
	r := &server{s: w.first}
	require.NoError(w.t, errOf(r.DeleteProject(w.admin(), &identityv1.DeleteProjectRequest{Id: "web", OrgId: "acme"})))
	require.NoError(w.t, errOf(r.CreateProject(w.admin(), &identityv1.CreateProjectRequest{Id: "web", OrgId: "acme"})))
}

func (w *world) mayCreate(s *Service, text string) error {
	caller, err := s.Verify(w.t.Context(), text)
	if err != nil {
		return err
	}
	_, err = auth.Admit(auth.With(w.t.Context(), caller, auth.RPC), createVM, "", "")
	return err
}

// TestDeletedProjectGivesNoAccessToALaterOne checks that tokens, roles and service accounts of a deleted project give
// no access, on any member, to a project that is created later with the same ID, even within the same millisecond.
func TestDeletedProjectGivesNoAccessToALaterOne(t *testing.T) {
	w := newWorld(t)
	other := w.member(30*time.Second, false)
	r := &server{s: w.first}
	w.user("root", cloud.Binding{Role: cloud.OrgAdmin, Org: "acme"})
	ada := cloud.Binding{Role: cloud.ProjectAdmin, Org: "acme", Project: "web"}
	w.user("ada", ada)
	scoped := func(s *Service, user cloud.UserID) string {
		return w.token(s, tokenRequest{User: user, Password: secret, Org: "acme", Project: "web"})
	}
	account, err := r.CreateServiceAccount(w.login("ada"), &identityv1.CreateServiceAccountRequest{Name: "ci", Roles: []string{"project:admin"}})
	require.NoError(t, err)
	tokens := map[string]string{
		"a user's token for org and project":                                          scoped(w.first, "ada"),
		"a user's token for org and project, issued by a member whose clock is ahead": scoped(other, "ada"),
		"a user's token for the project, without an org":                              w.token(w.first, tokenRequest{User: "ada", Password: secret, Project: "web"}),
		"a user's token without a scope":                                              w.token(w.first, tokenRequest{User: "ada", Password: secret}),
		"an org:admin's token for org and project":                                    scoped(w.first, "root"),
		"a service account's token":                                                   w.token(w.first, tokenRequest{User: cloud.UserID(account.GetAccount().GetId()), Password: account.GetSecret()}),
		"a token issued with the cluster key for org and project":                     w.hostToken(cloud.Tenant{Org: "acme", Project: "web"}),
	}
	for name, text := range tokens {
		require.NoError(t, w.mayCreate(w.first, text), name)
	}
	w.recreate()
	early := scoped(w.first, "ada")
	w.wait(time.Second)
	for name, text := range tokens {
		for _, s := range []*Service{w.first, other} {
			require.Error(t, w.mayCreate(s, text), name)
		}
	}
	list, err := r.ListBindings(w.admin(), &identityv1.ListBindingsRequest{OrgId: "acme", ProjectId: "web"})
	require.NoError(t, err)
	require.Empty(t, list.GetGrants())
	accounts, err := r.ListServiceAccounts(w.admin(), &identityv1.ListServiceAccountsRequest{OrgId: "acme", ProjectId: "web"})
	require.NoError(t, err)
	require.Empty(t, accounts.GetAccounts())
	u, err := r.GetUser(w.admin(), &identityv1.GetUserRequest{Id: "ada"})
	require.NoError(t, err)
	require.Empty(t, u.GetBindings())

	// The same role in the new project makes only tokens issued for the new project valid.
	require.NoError(t, w.bind("ada", ada))
	require.NoError(t, w.mayCreate(other, early), "a token issued for the new project before the role was given must be valid")
	require.NoError(t, w.mayCreate(other, scoped(other, "ada")))
	require.NoError(t, w.mayCreate(w.first, scoped(w.first, "root")))
	require.NoError(t, w.mayCreate(w.first, w.hostToken(cloud.Tenant{Org: "acme", Project: "web"})))
	for _, name := range []string{"a user's token for org and project", "a user's token for org and project, issued by a member whose clock is ahead", "an org:admin's token for org and project"} {
		err := w.mayCreate(w.first, tokens[name])
		require.True(t, fault.Is(err, fault.NotFound), "%s: %v", name, err)
	}
	_, err = r.UnbindRole(w.admin(), &identityv1.UnbindRoleRequest{UserId: "ada", Binding: oneOnWire(ada)})
	require.NoError(t, err)
	require.Error(t, w.mayCreate(w.first, scoped(w.first, "ada")))
}

// TestTokenFromBeforeTheProjectExisted checks that a token that was issued for a project ID before the project existed
// gives no access to the project.
func TestTokenFromBeforeTheProjectExisted(t *testing.T) {
	w := newWorld(t)
	w.user("root", cloud.Binding{Role: cloud.OrgAdmin, Org: "acme"})
	early := w.token(w.first, tokenRequest{User: "root", Password: secret, Org: "acme", Project: "web"})
	w.place(cloud.Binding{Org: "acme", Project: "web"})
	require.True(t, fault.Is(w.mayCreate(w.first, early), fault.NotFound))
	require.NoError(t, w.mayCreate(w.first, w.token(w.first, tokenRequest{User: "root", Password: secret, Org: "acme", Project: "web"})))
}

// TestOrgAdminCannotExhaustProjectIDs checks that the project IDs that an org:admin reserves by creating and deleting
// projects are bounded and become free again, and that the number of projects of an org is limited.
func TestOrgAdminCannotExhaustProjectIDs(t *testing.T) {
	w := newWorld(t)
	r := &server{s: w.first}
	w.user("mallory", cloud.Binding{Role: cloud.OrgAdmin, Org: "evil"})
	w.user("root", cloud.Binding{Role: cloud.OrgAdmin, Org: "acme"})
	create := func(user, org, id string) error {
		return errOf(r.CreateProject(w.login(user), &identityv1.CreateProjectRequest{Id: id, OrgId: org}))
	}
	require.NoError(t, create("mallory", "evil", "acme-production"))
	require.NoError(t, errOf(r.DeleteProject(w.login("mallory"), &identityv1.DeleteProjectRequest{Id: "acme-production", OrgId: "evil"})))
	err := create("root", "acme", "acme-production")
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)
	require.NotContains(t, err.Error(), "evil")
	w.wait(tenant.ReserveFor * time.Millisecond)
	require.NoError(t, create("root", "acme", "acme-production"))

	_, err = r.SetQuota(w.admin(), &identityv1.SetQuotaRequest{OrgId: "evil", Quota: &identityv1.Quota{Projects: new(uint64(3))}})
	require.NoError(t, err)
	for _, id := range []string{"e1", "e2", "e3"} {
		require.NoError(t, create("mallory", "evil", id))
	}
	err = create("mallory", "evil", "e4")
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.ErrorContains(t, err, "the quota of org evil")
}

// TestOrgQuotaPermissions checks that only system:admin can set the quota of an org, and that the org's administrators
// can read it.
func TestOrgQuotaPermissions(t *testing.T) {
	w := newWorld(t)
	r := &server{s: w.first}
	w.user("mallory", cloud.Binding{Role: cloud.OrgAdmin, Org: "evil"})
	w.user("ada", cloud.Binding{Role: cloud.ProjectAdmin, Org: "evil", Project: "lair"})
	w.user("biller", cloud.Binding{Role: cloud.BillingAdmin})
	set := func(ctx context.Context, org string) error {
		return errOf(r.SetQuota(ctx, &identityv1.SetQuotaRequest{OrgId: org, Quota: &identityv1.Quota{Vms: new(uint64(7))}}))
	}
	get := func(ctx context.Context, org string) (*identityv1.QuotaStatus, error) {
		return r.GetQuota(ctx, &identityv1.GetQuotaRequest{OrgId: org})
	}
	require.True(t, fault.Is(set(w.login("mallory"), "evil"), fault.PermissionDenied))
	require.True(t, fault.Is(set(w.login("ada"), "evil"), fault.PermissionDenied))
	require.True(t, fault.Is(set(w.login("biller"), "evil"), fault.PermissionDenied))
	require.True(t, fault.Is(set(w.admin(), "nowhere"), fault.NotFound))
	require.True(t, fault.Is(set(w.admin(), ""), fault.InvalidArgument))
	require.NoError(t, set(w.admin(), "evil"))
	for _, user := range []string{"mallory", "biller"} {
		q, err := get(w.login(user), "evil")
		require.NoError(t, err, user)
		require.Equal(t, uint64(7), q.GetQuota().GetVms())
		require.Equal(t, uint64(1), q.GetUsed().GetProjects())
		require.Empty(t, q.GetProjectId())
	}
	for _, user := range []string{"mallory", "ada"} {
		_, err := get(w.login(user), "default")
		require.True(t, fault.Is(err, fault.PermissionDenied), "%s: %v", user, err)
	}
	_, err := get(w.login("ada"), "evil")
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
	q, err := get(w.login("ada"), "")
	require.NoError(t, err, "a project:admin can read the quota of the project")
	require.Equal(t, "lair", q.GetProjectId())
	require.Nil(t, q.GetOrg(), "a project:admin cannot read the quota of the org")
	q, err = r.GetQuota(w.login("mallory"), &identityv1.GetQuotaRequest{OrgId: "evil", ProjectId: "lair"})
	require.NoError(t, err)
	require.Equal(t, uint64(7), q.GetOrg().GetQuota().GetVms())
	scoped := w.as(w.first, w.token(w.first, tokenRequest{User: "mallory", Password: secret, Org: "evil", Project: "lair"}))
	q, err = r.GetQuota(scoped, &identityv1.GetQuotaRequest{})
	require.NoError(t, err)
	require.Nil(t, q.GetOrg(), "a token that is limited to a project cannot read the quota of the org")
	_, err = r.CreateProject(w.login("mallory"), &identityv1.CreateProjectRequest{Id: "x", OrgId: "evil", Quota: &identityv1.Quota{Projects: new(uint64(9))}})
	require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
}

// TestDefaultQuotaOfNewProjects checks that only system:admin sets the default quota and exceeds it, and that an
// org:admin can create projects with lower limits.
func TestDefaultQuotaOfNewProjects(t *testing.T) {
	w := newWorld(t)
	r := &server{s: w.first}
	w.user("mallory", cloud.Binding{Role: cloud.OrgAdmin, Org: "evil"})
	standard := &identityv1.SetDefaultQuotaRequest{Quota: &identityv1.Quota{Vms: new(uint64(3))}}
	_, err := r.SetDefaultQuota(w.login("mallory"), standard)
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
	_, err = r.SetDefaultQuota(w.admin(), standard)
	require.NoError(t, err)
	seen, err := r.GetDefaultQuota(w.login("mallory"), &identityv1.GetDefaultQuotaRequest{})
	require.NoError(t, err)
	require.Equal(t, uint64(3), seen.GetQuota().GetVms())
	create := func(ctx context.Context, id string, vms *uint64) error {
		return errOf(r.CreateProject(ctx, &identityv1.CreateProjectRequest{Id: id, OrgId: "evil", Quota: &identityv1.Quota{Vms: vms}}))
	}
	err = create(w.login("mallory"), "more", new(uint64(4)))
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
	require.NoError(t, create(w.login("mallory"), "less", new(uint64(2))))
	require.NoError(t, create(w.login("mallory"), "standard", nil))
	require.NoError(t, create(w.admin(), "more", new(uint64(4))))
	for id, want := range map[string]uint64{"less": 2, "standard": 3, "more": 4} {
		q, err := r.GetQuota(w.admin(), &identityv1.GetQuotaRequest{ProjectId: id})
		require.NoError(t, err)
		require.Equal(t, want, q.GetQuota().GetVms(), id)
	}
}

// TestRecordsWithoutIncarnationsStayValid checks that roles, service accounts and tokens written by a version without
// incarnations stay valid until their project is deleted.
func TestRecordsWithoutIncarnationsStayValid(t *testing.T) {
	w := newWorld(t)
	r := &server{s: w.first}
	ada := cloud.Binding{Role: cloud.ProjectAdmin, Org: "acme", Project: "web"}
	w.user("ada", ada)
	_, err := w.first.opts.Store.Update(t.Context(), func(tx *store.Tx) error {
		p, err := tenant.Find(tx, "web")
		if err != nil {
			return err
		}
		p.Incarnation = 0
		tenant.Projects.Put(tx, p, "web")
		_, err = principal.Change(tx, "ada", func(u *principal.User) error {
			u.Bindings = []cloud.Binding{ada}
			return nil
		})
		return err
	})
	require.NoError(t, err)
	account, err := r.CreateServiceAccount(w.login("ada"), &identityv1.CreateServiceAccountRequest{Name: "ci", Roles: []string{"project:admin"}})
	require.NoError(t, err)
	tokens := []string{
		w.token(w.first, tokenRequest{User: "ada", Password: secret, Org: "acme", Project: "web"}),
		w.token(w.first, tokenRequest{User: "ada", Password: secret}),
		w.token(w.first, tokenRequest{User: cloud.UserID(account.GetAccount().GetId()), Password: account.GetSecret()}),
	}
	for i := range tokens {
		tokens[i] = w.withoutIncarnation(tokens[i])
		require.NoError(t, w.mayCreate(w.first, tokens[i]))
	}
	w.recreate()
	for _, text := range tokens {
		require.Error(t, w.mayCreate(w.first, text))
	}
}

// TestTokenDoesNotRevealForeignProjects checks the claims of a token for a project in which the user has no role. They
// must not tell whether the project belongs to another org or does not exist, nor change when it is created, nor
// contain the time of its creation.
func TestTokenDoesNotRevealForeignProjects(t *testing.T) {
	w := newWorld(t)
	w.user("mo", cloud.Binding{Role: cloud.ProjectMember, Org: "evil", Project: "lair"})
	w.place(cloud.Binding{Org: "acme", Project: "web"})
	var web cloud.Incarnation
	require.NoError(t, w.first.opts.Store.View(t.Context(), func(v *store.View) error {
		p, err := tenant.Find(v, "web")
		web = p.Incarnation
		return err
	}))
	require.NotZero(t, web)
	w.wait(time.Minute)
	claims := func(project string) map[string]any {
		text := w.token(w.first, tokenRequest{User: "mo", Password: secret, Project: project})
		require.NotContains(t, claimsOf(t, text), fmt.Sprint(web))
		var out map[string]any
		require.NoError(t, json.Unmarshal([]byte(claimsOf(t, text)), &out))
		require.IsType(t, "", out["incarnation"])
		return out
	}
	seen := map[any]bool{}
	for _, project := range []string{"web", "web", "none", "none", "lair"} {
		c := claims(project)
		require.Len(t, c["incarnation"], 22, project)
		require.False(t, seen[c["incarnation"]], "no two tokens may have the same incarnation claim: %s", project)
		seen[c["incarnation"]] = true
	}
	foreign, none := claims("web"), claims("none")
	require.ElementsMatch(t, slices.Collect(maps.Keys(foreign)), slices.Collect(maps.Keys(none)))
	for _, project := range []string{"web", "none"} {
		err := w.mayCreate(w.first, w.token(w.first, tokenRequest{User: "mo", Password: secret, Project: project}))
		require.True(t, fault.Is(err, fault.NotFound), "%s: %v", project, err)
	}
}

// TestIncarnationClaimIsBoundToItsToken checks that a token with the incarnation claim of another token for the same
// project is not valid for the project.
func TestIncarnationClaimIsBoundToItsToken(t *testing.T) {
	w := newWorld(t)
	w.user("ada", cloud.Binding{Role: cloud.ProjectAdmin, Org: "acme", Project: "web"})
	now, before := w.claims(), w.claims()
	require.True(t, w.actsInWeb(now))
	now.Incarnation = before.Incarnation
	require.False(t, w.actsInWeb(now))
}

// claims returns the claims of a new token of ada, scoped to acme/web.
func (w *world) claims() *token.Claims {
	w.t.Helper()
	return w.verified(w.token(w.first, tokenRequest{User: "ada", Password: secret, Org: "acme", Project: "web"}))
}

func (w *world) verified(text string) *token.Claims {
	w.t.Helper()
	_, private, err := w.first.signer(w.t.Context())
	require.NoError(w.t, err)
	parsed, err := token.Parse(text)
	require.NoError(w.t, err)
	c, err := parsed.Verify(private.Public().(ed25519.PublicKey), w.first.opts.Key.Cluster())
	require.NoError(w.t, err)
	return c
}

func (w *world) actsInWeb(c *token.Claims) (acts bool) {
	w.t.Helper()
	require.NoError(w.t, w.first.opts.Store.View(w.t.Context(), func(v *store.View) error {
		p, err := tenant.Find(v, "web")
		acts = w.first.actsIn(c, p)
		return err
	}))
	return acts
}

// withoutIncarnation returns the token text signed again without the incarnation claim, as versions without
// incarnations issued it.
func (w *world) withoutIncarnation(text string) string {
	w.t.Helper()
	c := w.verified(text)
	c.Incarnation, c.ID = "", ""
	id, private, err := w.first.signer(w.t.Context())
	require.NoError(w.t, err)
	out, err := token.Sign(private, id, *c, w.first.now(), time.Hour)
	require.NoError(w.t, err)
	require.NotContains(w.t, claimsOf(w.t, out), "incarnation")
	return out
}

// claimsOf returns the payload of a token, which is the JSON text of its claims.
func claimsOf(t testing.TB, text string) string {
	payload, err := base64.RawURLEncoding.DecodeString(strings.Split(text, ".")[1])
	require.NoError(t, err)
	return string(payload)
}

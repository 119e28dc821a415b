package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// TestRevocationOnEveryMember removes a role from a user, revokes tokens and disables the user. It checks that after
// each of these, every member soon refuses the user's calls and open watches end. A test in package identity checks,
// with virtual time, that this takes less than a second.
func TestRevocationOnEveryMember(t *testing.T) {
	w := newWorld(t)
	ctx := w.context(3 * time.Minute)
	text := w.tenant("ada", "acme", "shop", "project:member")
	list := func(member int) error {
		_, err := w.dial(member, text).VMs.ListVms(ctx, &vmv1.ListVmsRequest{OrgId: "acme", ProjectId: "shop"})
		return err
	}
	everywhere := func(want codes.Code) {
		t.Helper()
		for member := range w.trio.Members {
			err := list(member)
			require.Equal(t, want, status.Code(err), "at member %d: %v", member, err)
		}
	}
	soonEverywhere := func(want codes.Code) {
		t.Helper()
		require.NoError(t, lab.Until(ctx, "every member answers "+want.String(), func(context.Context) error {
			for member := range w.trio.Members {
				if err := list(member); status.Code(err) != want {
					return fmt.Errorf("member %d answers %v", member, err)
				}
			}
			return nil
		}))
		everywhere(want)
	}
	everywhere(codes.OK)

	w.credit(ctx, 1, w.adminToken, 201, http.MethodPost, "/api/v1/wallets", map[string]any{"project_id": "shop", "org_id": "acme", "initial_balance": 7})
	open := func() creditv1.CreditService_WatchTransactionsClient {
		watch, err := creditv1.NewCreditServiceClient(w.dial(3, text).Conn()).WatchTransactions(ctx, &creditv1.WatchTransactionsRequest{})
		require.NoError(t, err)
		_, err = watch.Recv()
		require.NoError(t, err, "the watch must return the transaction that created the wallet")
		return watch
	}
	watch := open()
	binding := &identityv1.Binding{Role: "project:member", OrgId: "acme", ProjectId: "shop"}
	_, err := w.admin.Identity.UnbindRole(ctx, &identityv1.UnbindRoleRequest{UserId: "ada", Binding: binding})
	require.NoError(t, err)
	soonEverywhere(codes.NotFound) // the same status as for a project that does not exist
	_, err = watch.Recv()
	require.Equal(t, codes.PermissionDenied, status.Code(err), "an open watch must end when the role is removed: %v", err)
	_, err = w.admin.Identity.BindRole(ctx, &identityv1.BindRoleRequest{UserId: "ada", Binding: binding})
	require.NoError(t, err)
	everywhere(codes.OK)

	watch = open()
	_, err = w.dial(2, text).Identity.RevokeToken(ctx, &identityv1.RevokeTokenRequest{Token: text})
	require.NoError(t, err)
	soonEverywhere(codes.Unauthenticated)
	for err == nil {
		_, err = watch.Recv()
	}
	require.Equal(t, codes.Unauthenticated, status.Code(err), "an open watch must end: %v", err)

	text, err = w.rest(3, "").IssueToken(ctx, "ada", "correct horse", nil)
	require.NoError(t, err)
	everywhere(codes.OK)
	_, err = w.dial(1, text).Identity.RevokeTokens(ctx, &identityv1.RevokeTokensRequest{UserId: "ada"})
	require.NoError(t, err)
	soonEverywhere(codes.Unauthenticated)

	text, err = w.rest(3, "").IssueToken(ctx, "ada", "correct horse", nil)
	require.NoError(t, err)
	everywhere(codes.OK)
	_, err = w.admin.Identity.DisableUser(ctx, &identityv1.DisableUserRequest{UserId: "ada"})
	require.NoError(t, err)
	soonEverywhere(codes.Unauthenticated)
	_, err = w.dial(1, "").Identity.IssueToken(ctx, &identityv1.IssueTokenRequest{Username: "ada", Password: "correct horse"})
	require.Equal(t, codes.Unauthenticated, status.Code(err))
}

// TestOtherLibrariesVerifyTokens checks that go-oidc, which gets only a member's URL, and all members accept valid
// tokens while the signing keys are rotated. It also checks that members refuse the tokens of a revoked key.
func TestOtherLibrariesVerifyTokens(t *testing.T) {
	w := newWorld(t)
	ctx := w.context(3 * time.Minute)
	w.tenant("ada", "acme", "shop", "project:member")
	token := func(member int) string {
		text, err := w.rest(member, "").IssueToken(ctx, "ada", "correct horse", map[string]any{"org_id": "acme", "project_id": "shop"})
		require.NoError(t, err)
		return text
	}
	verifiers := map[int]*oidc.IDTokenVerifier{}
	for member, host := range w.trio.Members {
		provider, err := oidc.NewProvider(ctx, "http://"+host+":8083")
		require.NoError(t, err)
		verifiers[member] = provider.Verifier(&oidc.Config{ClientID: "trivet"})
	}
	text := token(2)
	id, err := verifiers[2].Verify(ctx, text)
	require.NoError(t, err)
	var said map[string]any
	require.NoError(t, id.Claims(&said))
	require.Equal(t, []any{"ada", "project:acme/shop", "password", "user"}, []any{said["sub"], said["scope"], said["proof"], said["kind"]})
	require.NotContains(t, said, "roles")
	_, err = verifiers[1].Verify(ctx, text)
	require.ErrorContains(t, err, "issued by a different provider", "a token must be refused by the verifier of another URL")
	for _, word := range []string{"", "wrong password"} {
		unproven, err := w.rest(2, "").IssueToken(ctx, "admin", word, nil)
		require.NoError(t, err)
		_, err = verifiers[2].Verify(ctx, unproven)
		require.ErrorContains(t, err, "failed to verify signature", "an unauthenticated token must not verify, because every caller can get one")
	}

	var mu sync.Mutex
	current := text
	var checks atomic.Int64
	loading, stop := context.WithCancel(ctx)
	var load sync.WaitGroup
	failures := make(chan error, 100)
	for member := range w.trio.Members {
		load.Go(func() {
			client := w.dial(member, "").Identity
			for loading.Err() == nil {
				mu.Lock()
				text := current
				mu.Unlock()
				answer, err := client.VerifyToken(loading, &identityv1.VerifyTokenRequest{Token: text})
				if err == nil && !answer.GetValid() {
					err = fmt.Errorf("refused: %s", answer.GetReason())
				}
				if _, foreign := verifiers[2].Verify(loading, text); err == nil {
					err = foreign
				}
				if err != nil && loading.Err() == nil {
					failures <- fmt.Errorf("member %d: %w", member, err)
					return
				}
				checks.Add(1)
			}
		})
	}
	for range 3 {
		// Force is needed because the staged key is younger than the time for which verifiers may cache the published
		// keys. The verifiers of this test have no such cache.
		keys, err := w.admin.Identity.RotateKeys(ctx, &identityv1.RotateKeysRequest{Force: true})
		require.NoError(t, err)
		require.GreaterOrEqual(t, len(keys.GetKeys()), 3)
		fresh := token(2)
		mu.Lock()
		current = fresh
		mu.Unlock()
		before := checks.Load()
		require.NoError(t, lab.Until(ctx, "30 more checks were made", func(context.Context) error {
			if made := checks.Load() - before; made < 30 && len(failures) == 0 {
				return fmt.Errorf("%d were made", made)
			}
			return nil
		}))
	}
	stop()
	load.Wait()
	close(failures)
	for err := range failures {
		require.NoError(t, err)
	}
	_, err = w.admin.Identity.RotateKeys(ctx, &identityv1.RotateKeysRequest{})
	require.Equal(t, codes.FailedPrecondition, status.Code(err))

	keys, err := w.admin.Identity.ListKeys(ctx, &identityv1.ListKeysRequest{})
	require.NoError(t, err)
	for _, k := range keys.GetKeys() {
		if k.GetUse() == "primary" {
			_, err := w.admin.Identity.RevokeKey(ctx, &identityv1.RevokeKeyRequest{KeyId: k.GetId()})
			require.NoError(t, err)
		}
	}
	for member := range w.trio.Members {
		require.NoError(t, lab.Until(ctx, "the member refuses tokens of the revoked key", func(ctx context.Context) error {
			answer, err := w.dial(member, "").Identity.VerifyToken(ctx, &identityv1.VerifyTokenRequest{Token: current})
			if err == nil && answer.GetValid() {
				err = fmt.Errorf("member %d accepts one", member)
			}
			return err
		}))
	}
	_, err = w.dial(3, token(1)).Identity.WhoAmI(ctx, &identityv1.WhoAmIRequest{})
	require.NoError(t, err, "tokens of the staged key must be valid now")
}

// TestQuotaAndClosedRecords checks that a quota limits VMs that are created over REST, and that the key-value REST API
// gives no access to records of the control plane, such as users.
func TestQuotaAndClosedRecords(t *testing.T) {
	w := newWorld(t)
	ctx := w.context(2 * time.Minute)
	ada := w.rest(2, w.tenant("ada", "acme", "shop", "project:admin"))
	none := uint64(0)
	_, err := w.admin.Identity.SetQuota(ctx, &identityv1.SetQuotaRequest{OrgId: "acme", ProjectId: "shop", Quota: &identityv1.Quota{Vms: &none}})
	require.NoError(t, err)
	body := map[string]any{"name": "web", "org_id": "acme", "project_id": "shop", "vcpus": 1, "memory_mib": 128, "disks": []any{map[string]any{"id": "root", "source": map[string]any{"type": "blank"}, "size_gib": 1}}}
	a, err := ada.Do(ctx, 8084, http.MethodPost, "/api/v1/vms", body)
	require.NoError(t, err)
	require.Equal(t, []any{429, "RESOURCE_EXHAUSTED"}, []any{a.Status, a.Error.Code}, a.Raw)
	require.Contains(t, string(a.Error.Details), "QUOTA_EXCEEDED")

	account, err := w.dial(1, ada.Token).Identity.CreateServiceAccount(ctx, &identityv1.CreateServiceAccountRequest{Name: "deploy", Roles: []string{"project:viewer"}})
	require.NoError(t, err)
	for _, path := range []string{
		"/api/v1/kv?prefix=", "/api/v1/kv", "/api/v1/kv/user/ada", "/api/v1/kv/user%2Fada", "/api/v1/kv//user/ada", "/api/v1/kv/keyring/tokens",
		"/api/v1/kv/user/" + account.GetAccount().GetId(), "/api/v1/kv?prefix=user", "/api/v1/kv?prefix=%00", "/api/v1/kv/..%2fsystem%2fuser%2fada",
	} {
		resp, err := http.Get("http://127.0.0.1:8081" + path)
		require.NoError(t, err)
		text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		for _, secret := range []string{account.GetSecret(), "ada", "acme", "Sealed", "Password"} {
			found := string(text)
			// Remove the error message, which repeats the path, and the request ID, whose random letters may contain
			// the text.
			var e struct {
				Error struct{ Message string }
				Meta  struct {
					RequestID string `json:"request_id"`
				}
			}
			if json.Unmarshal(text, &e) == nil {
				for _, part := range []string{e.Error.Message, e.Meta.RequestID} {
					if part != "" {
						found = strings.ReplaceAll(found, part, "")
					}
				}
			}
			require.NotContains(t, found, secret, path)
		}
	}
}

// TestUpdateThroughEachMember changes display names and a service account through each of the members, of which two
// forward the changes to the leader. A new secret of the account is accepted by every member, the old one by none.
func TestUpdateThroughEachMember(t *testing.T) {
	w := newWorld(t)
	ctx := w.context(2 * time.Minute)
	ada := w.tenant("ada", "acme", "shop", "project:admin")
	made, err := w.dial(1, ada).Identity.CreateServiceAccount(ctx, &identityv1.CreateServiceAccountRequest{Name: "deploy", Roles: []string{"project:viewer"}})
	require.NoError(t, err)
	id, secret := made.GetAccount().GetId(), made.GetSecret()
	for member := range w.trio.Members {
		name := fmt.Sprintf("Name %d", member)
		operator := w.dial(member, w.adminToken).Identity
		org, err := operator.UpdateOrg(ctx, &identityv1.UpdateOrgRequest{Id: "acme", Name: &name})
		require.NoError(t, err)
		project, err := operator.UpdateProject(ctx, &identityv1.UpdateProjectRequest{Id: "shop", OrgId: "acme", Name: &name})
		require.NoError(t, err)
		user, err := operator.UpdateUser(ctx, &identityv1.UpdateUserRequest{UserId: "ada", Name: &name})
		require.NoError(t, err)
		require.Equal(t, []string{name, name, name}, []string{org.GetName(), project.GetName(), user.GetName()})

		ends := time.Now().Add(time.Hour).UnixMilli()
		changed, err := w.dial(member, ada).Identity.UpdateServiceAccount(ctx, &identityv1.UpdateServiceAccountRequest{
			Id: "deploy@acme/shop", Roles: []string{"project:member"}, ExpiresAt: &ends, NewSecret: true,
		})
		require.NoError(t, err)
		require.Equal(t, []any{id, ends, []string{"project:member"}},
			[]any{changed.GetAccount().GetId(), changed.GetAccount().GetExpiresAt(), changed.GetAccount().GetRoles()})
		old := secret
		secret = changed.GetSecret()
		for other := range w.trio.Members {
			issuer := w.dial(other, "").Identity
			_, err := issuer.IssueToken(ctx, &identityv1.IssueTokenRequest{Username: id, Password: secret})
			require.NoError(t, err)
			_, err = issuer.IssueToken(ctx, &identityv1.IssueTokenRequest{Username: id, Password: old})
			require.Equal(t, codes.Unauthenticated, status.Code(err), "%v", err)
		}
	}
}

// TestRevocationBehindAPartition checks that a member which is partitioned from the others soon refuses every token
// with UNAVAILABLE, because one may have been revoked. After the partition it must refuse the revoked token as such.
func TestRevocationBehindAPartition(t *testing.T) {
	hosts, err := lab.NewHosts(1, 2, 3)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, hosts.Close()) })
	w := newWorld(t, func(w *world) {
		w.trio.Net = hosts.Net
		w.trio.Extra = append(w.trio.Extra, "--insecure-plaintext", "--rest-open", "identity")
		for id := range w.trio.Members {
			w.trio.Members[id] = hosts.Address(id)
		}
	})
	t.Cleanup(func() { require.NoError(t, hosts.Heal()) })
	ctx := w.context(3 * time.Minute)
	text := w.tenant("ada", "acme", "shop", "project:member")
	away := w.leader(1)%3 + 1 // the follower that is cut off
	near := away%3 + 1
	ask := func(member int) (*identityv1.WhoAmIResponse, error) {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		return w.dial(member, text).Identity.WhoAmI(ctx, &identityv1.WhoAmIRequest{})
	}
	_, err = ask(away)
	require.NoError(t, err)
	for member := range w.trio.Members {
		if member != away {
			require.NoError(t, hosts.Cut(away, member))
			require.NoError(t, hosts.Cut(member, away))
		}
	}
	_, err = w.dial(near, text).Identity.RevokeToken(ctx, &identityv1.RevokeTokenRequest{Token: text})
	require.NoError(t, err)
	for member, want := range map[int]codes.Code{near: codes.Unauthenticated, away: codes.Unavailable} {
		require.NoError(t, lab.Until(ctx, "the token is refused", func(context.Context) error {
			if _, err = ask(member); status.Code(err) != want {
				return fmt.Errorf("member %d answers %v, want %v", member, err, want)
			}
			return nil
		}))
	}
	_, err = ask(away)
	require.ErrorContains(t, err, "does not reach the others", "a member without the others must refuse a token that may be revoked")
	a, err := w.rest(away, text).Do(ctx, 8084, http.MethodGet, "/api/v1/vms", nil)
	require.NoError(t, err)
	require.Equal(t, 500, a.Status, a.Raw)

	require.NoError(t, hosts.Heal())
	require.NoError(t, lab.Until(ctx, "the member that was partitioned refuses the token as revoked", func(context.Context) error {
		if _, err := ask(away); status.Code(err) != codes.Unauthenticated {
			return fmt.Errorf("the member returns %w", err)
		}
		return nil
	}))
}

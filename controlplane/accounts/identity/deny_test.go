package identity

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// newServiceAccount creates a service account in the default project, and returns a token request with its credential.
// Requests for accounts need no password hashing, so they are fast.
func (w *world) newServiceAccount(name string) tokenRequest {
	w.t.Helper()
	admin := w.as(w.first, w.hostToken(cloud.Tenant{Org: "default", Project: "default"}))
	made, err := (&server{s: w.first}).CreateServiceAccount(admin, &identityv1.CreateServiceAccountRequest{
		OrgId: "default", ProjectId: "default", Name: name, Roles: []string{"project:viewer"},
	})
	require.NoError(w.t, err)
	return tokenRequest{User: cloud.UserID(made.GetAccount().GetId()), Password: made.GetSecret(), TTL: token.MaxTTL}
}

// denials returns the number of stored records of revoked tokens, including index entries.
func (w *world) denials() (n int) {
	w.t.Helper()
	require.NoError(w.t, w.first.opts.Store.Local(func(v *store.View) error {
		one, _, err := denials.List(v, 0)
		if err != nil {
			return err
		}
		two, _, err := overDenials.List(v, 0)
		if err != nil {
			return err
		}
		three, _, err := userDenials.List(v, 0)
		n = len(one) + len(two) + len(three)
		return err
	}))
	return n
}

// TestIssueAndRevokeIsRateLimited checks that a service account that issues and revokes tokens in a loop is refused
// after tokenBurst tokens, by gRPC and REST, and may issue one more after a second. Other principals must not be
// affected.
func TestIssueAndRevokeIsRateLimited(t *testing.T) {
	w := newWorld(t)
	r := &server{s: w.first}
	loop, other := w.newServiceAccount("loop"), w.newServiceAccount("other")
	issue := func(q tokenRequest) (string, error) {
		out, err := r.IssueToken(t.Context(), &identityv1.IssueTokenRequest{Username: string(q.User), Password: q.Password, TtlSeconds: q.TTL})
		return out.GetToken(), err
	}
	issued, refused := 0, 0
	for range 10 * tokenBurst {
		text, err := issue(loop)
		if err != nil {
			f, _ := fault.From(err)
			require.Equal(t, fault.ResourceExhausted, f.Kind, "%v", err)
			require.True(t, f.Retry)
			refused++
			continue
		}
		issued++
		require.NoError(t, errOf(r.RevokeToken(w.as(w.first, text), &identityv1.RevokeTokenRequest{Token: text})))
	}
	require.Equal(t, []int{tokenBurst, 9 * tokenBurst}, []int{issued, refused})
	require.Equal(t, 3*tokenBurst, w.denials())
	require.EqualValues(t, tokenBurst, w.first.Revocations())

	handler := rest.New(rest.Options{Service: fault.Identity, Name: "identity", Log: slog.New(slog.DiscardHandler), Metrics: rest.NewMetrics(prometheus.NewRegistry())})
	w.first.Routes(handler, false)
	ask := func(q tokenRequest) *httptest.ResponseRecorder {
		body := fmt.Sprintf(`{"username":%q,"password":%q}`, q.User, q.Password)
		in := httptest.NewRequest(http.MethodPost, "http://127.0.0.1/api/v1/auth/token", strings.NewReader(body))
		in.Header.Set("Content-Type", "application/json")
		a := httptest.NewRecorder()
		handler.ServeHTTP(a, in)
		return a
	}
	a := ask(loop)
	require.Equal(t, http.StatusServiceUnavailable, a.Code)
	require.Contains(t, a.Body.String(), `"code":"SERVICE_UNAVAILABLE"`)
	require.NotEmpty(t, a.Header().Get("Retry-After"))
	require.Equal(t, http.StatusOK, ask(other).Code)
	loop.Password = "wrong"
	require.Equal(t, http.StatusOK, ask(loop).Code, "an unauthenticated token must not count toward the principal's rate limit")

	text, err := issue(other)
	require.NoError(t, err)
	ctx := w.as(w.first, text)
	w.wait(tokenEvery)
	for range tokenBurst {
		require.NoError(t, errOf(r.RevokeToken(ctx, &identityv1.RevokeTokenRequest{Token: "garbage"})))
	}
	err = errOf(r.RevokeToken(ctx, &identityv1.RevokeTokenRequest{Token: text}))
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	w.wait(tokenEvery)
	require.NoError(t, errOf(r.RevokeToken(ctx, &identityv1.RevokeTokenRequest{Token: text})))
}

// TestManyRevokedTokensEndThemAll checks that the revocation after maxDenials single ones invalidates all tokens of the
// principal and deletes the stored denials, and that no revoked token becomes valid again.
func TestManyRevokedTokensEndThemAll(t *testing.T) {
	w := newWorld(t)
	r := &server{s: w.first}
	slow, other := w.newServiceAccount("slow"), w.newServiceAccount("other")
	revoke := func(q tokenRequest) (string, error) {
		w.wait(tokenEvery)
		text := w.token(w.first, q)
		return text, errOf(r.RevokeToken(w.as(w.first, text), &identityv1.RevokeTokenRequest{Token: text}))
	}
	valid := func(text string) bool {
		_, err := w.first.Verify(t.Context(), text)
		require.True(t, err == nil || fault.Is(err, fault.Unauthenticated), "%v", err)
		return err == nil
	}
	theirs, err := revoke(other)
	require.NoError(t, err)
	kept := w.token(w.first, slow)
	var revoked []string
	for range maxDenials {
		text, err := revoke(slow)
		require.NoError(t, err)
		revoked = append(revoked, text)
	}
	require.Equal(t, 3*(maxDenials+1), w.denials())
	require.True(t, valid(kept))

	last, err := revoke(slow)
	require.NoError(t, err)
	require.Equal(t, 3, w.denials(), "only the denials of the other account must be left")
	for _, text := range append(revoked, last, kept, theirs) {
		require.False(t, valid(text))
	}
	require.True(t, valid(w.token(w.first, slow)), "the principal can log in again")
}

// TestDenialsOfAnOrgAreBounded stores maxOrgDenials denials of an org's service accounts. The next revocation must
// invalidate all tokens of its account, store no denial, and not affect other accounts.
func TestDenialsOfAnOrgAreBounded(t *testing.T) {
	w := newWorld(t)
	r := &server{s: w.first}
	ci, other := w.newServiceAccount("ci"), w.newServiceAccount("other")
	stored := func() (n uint64) {
		require.NoError(t, w.first.opts.Store.Local(func(v *store.View) error {
			count, err := orgDenials.Get(v, "default")
			if count != nil {
				n = *count
			}
			return err
		}))
		return n
	}
	revoke := func(text string) {
		require.NoError(t, errOf(r.RevokeToken(w.as(w.first, text), &identityv1.RevokeTokenRequest{Token: text})))
	}
	revoke(w.token(w.first, other))
	require.EqualValues(t, 1, stored())
	_, err := w.first.opts.Store.Update(t.Context(), func(tx *store.Tx) error {
		return (&denial{Org: "default"}).count(tx, maxOrgDenials-1) // counts denials as if of accounts that have been deleted
	})
	require.NoError(t, err)
	kept, revoked, theirs := w.token(w.first, ci), w.token(w.first, ci), w.token(w.first, other)
	revoke(revoked)
	require.EqualValues(t, maxOrgDenials, stored(), "no further denial must be stored")
	for _, text := range []string{kept, revoked} {
		_, err := w.first.Verify(t.Context(), text)
		require.True(t, fault.Is(err, fault.Unauthenticated), "all tokens of the account are revoked: %v", err)
	}
	for _, text := range []string{theirs, w.token(w.first, ci)} {
		_, err := w.first.Verify(t.Context(), text)
		require.NoError(t, err)
	}
	w.wait(longest + time.Hour)
	require.NoError(t, w.first.Tend(t.Context()))
	require.EqualValues(t, maxOrgDenials-1, stored(), "a deleted denial must not be counted")
}

// TestDenialsOfFormerVersions checks that denials without a principal, as former versions wrote them, still revoke
// their tokens and are deleted after the tokens' expiry.
func TestDenialsOfFormerVersions(t *testing.T) {
	w := newWorld(t)
	text := w.token(w.first, w.newServiceAccount("ci"))
	caller, err := w.first.Verify(t.Context(), text)
	require.NoError(t, err)
	_, err = w.first.opts.Store.Update(t.Context(), func(tx *store.Tx) error {
		type former struct {
			Token string
			Until cloud.Time
		}
		store.NewTable[former]("denied").Put(tx, &former{caller.TokenID, caller.Expires}, caller.TokenID)
		overDenials.Put(tx, &struct{}{}, until(caller.Expires), caller.TokenID)
		return nil
	})
	require.NoError(t, err)
	require.True(t, fault.Is(errOf(w.first.Verify(t.Context(), text)), fault.Unauthenticated))
	w.wait(token.MaxTTL*time.Second + time.Minute)
	require.NoError(t, w.first.Tend(t.Context()))
	require.Zero(t, w.denials())
}

// TestAdminTokensAreNotCounted checks that the denial of a host-key token is not counted for the administrator.
// Otherwise many revocations would invalidate all host-key tokens, which operators use.
func TestAdminTokensAreNotCounted(t *testing.T) {
	w := newWorld(t)
	ctx := func(text string) context.Context { return w.as(w.first, text) }
	text := w.hostToken(cloud.Tenant{})
	require.NoError(t, errOf((&server{s: w.first}).RevokeToken(ctx(text), &identityv1.RevokeTokenRequest{Token: text})))
	require.Equal(t, 2, w.denials())
}

// TestRatesAreBounded checks that a member has rate limiters for at most maxRates principals, and does not evict that
// of a principal who used up the burst.
func TestRatesAreBounded(t *testing.T) {
	p, at := newPrincipalRates(), time.UnixMilli(1_800_000_000_000)
	for range tokenBurst {
		require.True(t, p.allow("loop", at))
	}
	for i := range 2 * maxRates {
		require.True(t, p.allow(cloud.UserID(fmt.Sprint(i)), at))
		require.LessOrEqual(t, len(p.limits), maxRates)
	}
	require.False(t, p.allow("loop", at))
}

// TestRevocationAppliesOnEveryMember revokes a user's token in each possible way on one member. Both members must then
// refuse the token. Tokens of other users must stay valid, except after their signing key was revoked.
func TestRevocationAppliesOnEveryMember(t *testing.T) {
	w := newWorld(t)
	other := w.member(0, false)
	r := &server{s: w.first}
	w.user("ada", member)
	w.user("bob", member)
	for name, end := range map[string]func(ctx context.Context, text string) error{
		"revoked by its holder": func(ctx context.Context, text string) error {
			return errOf(r.RevokeToken(ctx, &identityv1.RevokeTokenRequest{Token: text}))
		},
		"revoked by its id": func(ctx context.Context, _ string) error {
			return errOf(r.RevokeToken(w.admin(), &identityv1.RevokeTokenRequest{TokenId: auth.CallerOf(ctx).TokenID}))
		},
		"all revoked by themselves": func(ctx context.Context, _ string) error {
			return errOf(r.RevokeTokens(ctx, &identityv1.RevokeTokensRequest{UserId: "ada"}))
		},
		"disabled": func(context.Context, string) error {
			return errors.Join(errOf(r.DisableUser(w.admin(), &identityv1.DisableUserRequest{UserId: "ada"})),
				errOf(r.EnableUser(w.admin(), &identityv1.EnableUserRequest{UserId: "ada"})))
		},
		"the key revoked": func(context.Context, string) error {
			ring, err := r.ListKeys(w.admin(), &identityv1.ListKeysRequest{})
			if err != nil {
				return err
			}
			return errOf(r.RevokeKey(w.admin(), &identityv1.RevokeKeyRequest{KeyId: ring.GetKeys()[0].GetId()}))
		},
		"deleted and made again": func(context.Context, string) error {
			if err := errOf(r.DeleteUser(w.admin(), &identityv1.DeleteUserRequest{UserId: "ada"})); err != nil {
				return err
			}
			w.user("ada", member)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			text := w.token(w.first, tokenRequest{User: "ada", Password: secret})
			theirs := w.token(w.first, tokenRequest{User: "bob", Password: secret})
			ctx := w.as(other, text)
			require.NoError(t, end(ctx, text))
			for _, s := range []*Service{w.first, other} {
				_, err := s.Verify(t.Context(), text)
				require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
				if name != "the key revoked" {
					_, err = s.Verify(t.Context(), theirs)
					require.NoError(t, err)
				}
			}
			again := w.token(other, tokenRequest{User: "ada", Password: secret})
			_, err := w.first.Verify(t.Context(), again)
			require.NoError(t, err, "a new one is good")
		})
	}
	bob := w.login("bob")
	err := errOf(r.RevokeToken(bob, &identityv1.RevokeTokenRequest{TokenId: auth.CallerOf(w.login("ada")).TokenID}))
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
	err = errOf(r.RevokeTokens(bob, &identityv1.RevokeTokensRequest{UserId: "ada"}))
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
	require.NoError(t, errOf(r.RevokeToken(bob, &identityv1.RevokeTokenRequest{Token: "garbage"})), "what is worth nothing is over already")
}

// TestDenialsExpire checks that Tend removes the record of a revoked token only after the token has expired on every
// member, that is, token.Leeway after its expiry.
func TestDenialsExpire(t *testing.T) {
	w := newWorld(t)
	w.user("ada", member)
	text := w.token(w.first, tokenRequest{User: "ada", Password: secret, TTL: 60})
	require.NoError(t, errOf((&server{s: w.first}).RevokeToken(w.as(w.first, text), &identityv1.RevokeTokenRequest{Token: text})))
	kept := func() (n int) {
		require.NoError(t, w.first.Tend(t.Context()))
		require.NoError(t, w.first.opts.Store.Local(func(v *store.View) error {
			all, _, err := denials.List(v, 0)
			n = len(all)
			return err
		}))
		return n
	}
	w.wait(60*time.Second + token.Leeway - time.Second)
	require.Equal(t, 1, kept())
	w.wait(2 * time.Second)
	require.Equal(t, 0, kept())
}

package identity

import (
	"encoding/json"
	"net/http"
	"testing"
	"time"

	gooidc "github.com/coreos/go-oidc/v3/oidc"
	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/oidc"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestRelyingPartiesRefuseUnauthenticatedTokens checks that an OpenID relying party accepts tokens of users who gave a
// correct password, and refuses unauthenticated ones. Each of three reasons must suffice: the signing key is not
// published, the audience is not the relying party's, and the subject is no user's ID.
func TestRelyingPartiesRefuseUnauthenticatedTokens(t *testing.T) {
	w := newWorld(t)
	w.user("ada", member)
	issuer := w.rawResponse(t, w.first)
	provider, err := gooidc.NewProvider(t.Context(), issuer)
	require.NoError(t, err)
	now := func() time.Time { w.mu.Lock(); defer w.mu.Unlock(); return w.at }
	verifier := provider.Verifier(&gooidc.Config{ClientID: token.Audience, Now: now})
	anyKey := provider.Verifier(&gooidc.Config{ClientID: token.Audience, Now: now, InsecureSkipSignatureCheck: true})
	anyAudience := provider.Verifier(&gooidc.Config{SkipClientIDCheck: true, Now: now})

	for _, q := range []tokenRequest{
		{User: "admin", TTL: token.MaxTTL}, {User: "ada", Password: "wrong password"}, {User: "nobody", Password: secret}, {User: "ada", Org: "default", Project: "default"},
	} {
		text := w.token(w.first, q)
		caller, err := w.first.Verify(t.Context(), text)
		require.NoError(t, err, "the wire contract requires that an unauthenticated token is valid")
		require.Equal(t, cloud.ProofNone, caller.Proof)
		require.Equal(t, q.User, caller.User, "the user must be the claimed name, without the prefix of the subject")

		_, err = verifier.Verify(t.Context(), text)
		require.Error(t, err)
		_, err = anyKey.Verify(t.Context(), text)
		require.ErrorContains(t, err, `expected audience "trivet" got ["trivet:unproven"]`)
		_, err = anyAudience.Verify(t.Context(), text)
		require.ErrorContains(t, err, "failed to verify signature", "the key of unauthenticated tokens must not be published")
		parsed, err := jwt.ParseSigned(text, []jose.SignatureAlgorithm{jose.EdDSA})
		require.NoError(t, err)
		var claims jwt.Claims
		require.NoError(t, parsed.UnsafeClaimsWithoutVerification(&claims))
		require.Equal(t, "unproven:"+string(q.User), claims.Subject)
	}
	proven, err := verifier.Verify(t.Context(), w.token(w.first, tokenRequest{User: "ada", Password: secret}))
	require.NoError(t, err)
	require.Equal(t, "ada", proven.Subject)

	answer, err := http.Get(issuer + "/.well-known/jwks.json")
	require.NoError(t, err)
	defer answer.Body.Close()
	var keys jose.JSONWebKeySet
	require.NoError(t, json.NewDecoder(answer.Body).Decode(&keys))
	require.Len(t, keys.Keys, 2, "the primary and the staged key must be published")
	require.Empty(t, keys.Key(unprovenKeyID))
	require.Empty(t, keys.Key(hostKeyID))
}

// TestAnotherCloudRefusesUnauthenticatedTokens checks that a second Trivet cloud, with this one as its OpenID provider,
// logs in a user of this cloud who gave a correct password, and refuses a caller who only claims the user's name.
func TestAnotherCloudRefusesUnauthenticatedTokens(t *testing.T) {
	w, other := newWorld(t), newWorld(t)
	w.user("ada", member)
	other.providers = []oidc.Provider{{Name: "first", Issuer: w.rawResponse(t, w.first), ClientID: token.Audience}}
	r := &server{s: other.member(0, false)}
	_, err := r.CreateUser(other.admin(), &identityv1.CreateUserRequest{Id: "ada"})
	require.NoError(t, err)
	for _, subject := range []string{"ada", "unproven:ada"} {
		_, err = r.LinkIdentity(other.admin(), &identityv1.LinkIdentityRequest{UserId: "ada", Identity: &identityv1.Identity{Provider: "first", Subject: subject}})
		require.NoError(t, err)
	}
	exchange := func(text string) error {
		return errOf(r.ExchangeToken(t.Context(), &identityv1.ExchangeTokenRequest{Provider: "first", IdToken: text}))
	}
	err = exchange(w.token(w.first, tokenRequest{User: "ada"}))
	require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
	require.NoError(t, exchange(w.token(w.first, tokenRequest{User: "ada", Password: secret})))
}

// TestDevAcceptsUnauthenticatedTokens checks that with --dev on two members, an unauthenticated token that one issued
// is accepted by the other.
func TestDevAcceptsUnauthenticatedTokens(t *testing.T) {
	w := newWorld(t)
	one, two := w.member(0, true), w.member(0, true)
	caller, err := two.Verify(t.Context(), w.token(one, tokenRequest{User: "ada"}))
	require.NoError(t, err)
	require.Equal(t, cloud.ProofDev, caller.Proof)
	require.EqualValues(t, "ada", caller.User)
}

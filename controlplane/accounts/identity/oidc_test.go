package identity

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/oidc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// testProvider is an OpenID provider on a local HTTP server. While away is set, it returns errors.
type testProvider struct {
	t      *testing.T
	server *httptest.Server
	key    *ecdsa.PrivateKey
	kid    string
	away   atomic.Bool
}

func newTestProvider(t *testing.T) *testProvider {
	c := &testProvider{t: t}
	c.rotateKey("k1")
	mux := http.NewServeMux()
	mux.HandleFunc("/.well-known/openid-configuration", func(w http.ResponseWriter, _ *http.Request) {
		json.NewEncoder(w).Encode(map[string]any{
			"issuer": c.server.URL, "jwks_uri": c.server.URL + "/keys", "authorization_endpoint": c.server.URL + "/auth",
			"token_endpoint": c.server.URL + "/token", "id_token_signing_alg_values_supported": []string{"ES256"},
		})
	})
	mux.HandleFunc("/keys", func(w http.ResponseWriter, _ *http.Request) {
		json.NewEncoder(w).Encode(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: c.key.Public(), KeyID: c.kid, Algorithm: "ES256", Use: "sig"}}})
	})
	c.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c.away.Load() {
			http.Error(w, "away", http.StatusBadGateway)
			return
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(c.server.Close)
	return c
}

func (c *testProvider) rotateKey(kid string) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(c.t, err)
	c.key, c.kid = key, kid
}

// signIDToken returns an ID token for the client, signed with the provider's key, issued at `at` and valid for an hour.
// more lists names and values of further claims.
func (c *testProvider) signIDToken(subject, client, nonce string, at time.Time, more ...string) string {
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: c.key, KeyID: c.kid}}, nil)
	require.NoError(c.t, err)
	own := map[string]any{"nonce": nonce}
	for i := 0; i+1 < len(more); i += 2 {
		own[more[i]] = more[i+1]
	}
	text, err := jwt.Signed(signer).Claims(jwt.Claims{
		Issuer: c.server.URL, Subject: subject, Audience: jwt.Audience{client}, IssuedAt: jwt.NewNumericDate(at), Expiry: jwt.NewNumericDate(at.Add(time.Hour)),
	}).Claims(own).Serialize()
	require.NoError(c.t, err)
	return text
}

// TestLoginThroughAnotherProvider exchanges ID tokens of an OpenID provider for tokens of Trivet. A caller must get a
// token of the user who is linked with the ID token's provider, issuer and subject. Invalid ID tokens must be refused.
func TestLoginThroughAnotherProvider(t *testing.T) {
	w := newWorld(t)
	idp := newTestProvider(t)
	w.providers = []oidc.Provider{{Name: "corp", Issuer: idp.server.URL, ClientID: "trivet-cloud", Scopes: []string{"email"}}}
	s := w.member(0, false)
	r := &server{s: s}
	list, err := r.ListLoginProviders(t.Context(), &identityv1.ListLoginProvidersRequest{})
	require.NoError(t, err)
	require.Equal(t, idp.server.URL, list.GetProviders()[0].GetIssuer())

	_, err = r.CreateUser(w.admin(), &identityv1.CreateUserRequest{Id: "ada"})
	require.NoError(t, err)
	err = w.bind("ada", member)
	require.ErrorContains(t, err, "no credential")
	link := func(user, subject string) error {
		return errOf(r.LinkIdentity(w.admin(), &identityv1.LinkIdentityRequest{UserId: user, Identity: &identityv1.Identity{Provider: "corp", Subject: subject}}))
	}
	login := func(provider, text, nonce string) (*identityv1.IssueTokenResponse, error) {
		return r.ExchangeToken(t.Context(), &identityv1.ExchangeTokenRequest{Provider: provider, IdToken: text, Nonce: nonce})
	}
	good := func() string { return idp.signIDToken("ada@corp", "trivet-cloud", "n1", w.at) }

	idp.away.Store(true)
	_, err = login("corp", good(), "n1")
	require.True(t, fault.Is(err, fault.Unavailable), "%v", err)
	idp.away.Store(false)
	s = w.member(0, false) // a new member contacts the provider at once; the former one waits for askAgain
	r.s = s
	_, err = login("corp", good(), "n1")
	require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
	require.ErrorContains(t, err, "nobody here is linked")
	require.NoError(t, link("ada", "ada@corp"))
	require.NoError(t, link("ada", "ada@corp"), "a repeated link must be accepted")
	require.NoError(t, w.bind("ada", member), "a linked identity is a credential, so roles can be given")
	_, err = r.CreateUser(w.admin(), &identityv1.CreateUserRequest{Id: "eve"})
	require.NoError(t, err)
	require.ErrorContains(t, link("eve", "ada@corp"), "another user's")
	require.ErrorContains(t, link("eve", ""), "subject")

	made, err := login("corp", good(), "n1")
	require.NoError(t, err)
	caller, err := w.first.Verify(t.Context(), made.GetToken())
	require.NoError(t, err)
	require.Equal(t, cloud.ProofOIDC, caller.Proof)
	require.Len(t, caller.Bindings, 1)
	require.True(t, member.Same(caller.Bindings[0]))
	require.EqualValues(t, "ada", caller.User)

	foreign := newTestProvider(t)
	foreign.server.URL = idp.server.URL
	// elsewhere signs ID tokens with the key of idp, but with another issuer.
	elsewhere := &testProvider{t: t, key: idp.key, kid: idp.kid, server: &httptest.Server{URL: "https://login.example"}}
	for name, c := range map[string]struct {
		provider, text, nonce string
		kind                  fault.Kind
	}{
		"an unknown provider":                {"else", good(), "", fault.InvalidArgument},
		"no token":                           {"corp", "", "", fault.InvalidArgument},
		"a malformed token":                  {"corp", "a.b.c", "", fault.Unauthenticated},
		"the audience of another client":     {"corp", idp.signIDToken("ada@corp", "wiki", "n1", w.at), "n1", fault.Unauthenticated},
		"the nonce of another login":         {"corp", good(), "n2", fault.Unauthenticated},
		"another client as authorized party": {"corp", idp.signIDToken("ada@corp", "trivet-cloud", "n1", w.at, "azp", "wiki"), "n1", fault.Unauthenticated},
		"an expired token":                   {"corp", idp.signIDToken("ada@corp", "trivet-cloud", "n1", w.at.Add(-2*time.Hour)), "n1", fault.Unauthenticated},
		"the signature of another key":       {"corp", foreign.signIDToken("ada@corp", "trivet-cloud", "n1", w.at), "n1", fault.Unauthenticated},
		"another issuer":                     {"corp", elsewhere.signIDToken("ada@corp", "trivet-cloud", "n1", w.at), "n1", fault.Unauthenticated},
		"a subject linked with no user":      {"corp", idp.signIDToken("bob@corp", "trivet-cloud", "n1", w.at), "n1", fault.Unauthenticated},
		"a token of Trivet":                  {"corp", made.GetToken(), "", fault.Unauthenticated},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := login(c.provider, c.text, c.nonce)
			require.True(t, fault.Is(err, c.kind), "%v", err)
		})
	}
	idp.rotateKey("k2")
	_, err = login("corp", good(), "n1")
	require.NoError(t, err, "a token signed with the provider's new key must be accepted")

	_, err = r.UnlinkIdentity(w.admin(), &identityv1.UnlinkIdentityRequest{UserId: "ada", Identity: &identityv1.Identity{Provider: "corp", Subject: "ada@corp"}})
	require.NoError(t, err)
	require.ErrorContains(t, errOf(w.first.Verify(t.Context(), made.GetToken())), "no longer valid")
	_, err = login("corp", good(), "n1")
	require.ErrorContains(t, err, "nobody here is linked")
	require.NoError(t, link("eve", "ada@corp"), "an unlinked identity can be linked with another user")

	// A different provider that later gets the same name in the configuration cannot authenticate the linked users.
	later := newTestProvider(t)
	w.providers[0].Issuer = later.server.URL
	r.s = w.member(0, false)
	_, err = login("corp", later.signIDToken("ada@corp", "trivet-cloud", "n1", w.at), "n1")
	require.ErrorContains(t, err, "nobody here is linked")
}

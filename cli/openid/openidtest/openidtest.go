// Package openidtest is a small OpenID provider over HTTP for tests. It serves the authorization code flow for public
// clients and verifies PKCE. It redirects every valid authorization request at once, with Provider.Subject as the user.
package openidtest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/stretchr/testify/require"
)

// Provider is a running OpenID provider with the URL Issuer. Its function fields are optional; a test sets them before
// the first request.
type Provider struct {
	Issuer, ClientID, Subject string
	Now                       time.Time
	// The provider calls Configuration with the discovery document, Redirect with the parameters of the redirect, and
	// Claims with the claims of the ID token. Each can change its argument before the provider sends it.
	Configuration func(map[string]any)
	Redirect      func(url.Values)
	Claims        func(map[string]any)
	// Token, if set, is the HTTP handler of the token endpoint. It replaces the provider's own.
	Token http.HandlerFunc

	key *ecdsa.PrivateKey

	mu     sync.Mutex
	asked  map[string]url.Values
	issued []string
	last   url.Values
}

// New starts a provider that serves until the test ends. now is the time at which its ID tokens are issued.
func New(t *testing.T, now time.Time) *Provider {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	p := &Provider{ClientID: "trivet-cli", Subject: "248289761001", Now: now, key: key, asked: map[string]url.Values{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /.well-known/openid-configuration", p.configuration)
	mux.HandleFunc("GET /keys", p.keys)
	mux.HandleFunc("GET /authorize", p.authorize)
	mux.HandleFunc("POST /token", p.token)
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	p.Issuer = s.URL
	return p
}

// Issued returns all ID tokens that the provider has issued.
func (p *Provider) Issued() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.issued...)
}

// Asked returns the query parameters of the last valid authorization request.
func (p *Provider) Asked() url.Values {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last
}

func (p *Provider) configuration(w http.ResponseWriter, _ *http.Request) {
	c := map[string]any{
		"issuer": p.Issuer, "authorization_endpoint": p.Issuer + "/authorize", "token_endpoint": p.Issuer + "/token", "jwks_uri": p.Issuer + "/keys",
		"response_types_supported": []string{"code"}, "subject_types_supported": []string{"public"},
		"id_token_signing_alg_values_supported": []string{"ES256"}, "code_challenge_methods_supported": []string{"S256"},
	}
	if p.Configuration != nil {
		p.Configuration(c)
	}
	answer(w, http.StatusOK, c)
}

func (p *Provider) keys(w http.ResponseWriter, _ *http.Request) {
	answer(w, http.StatusOK, jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: p.key.Public(), KeyID: "1", Algorithm: "ES256", Use: "sig"}}})
}

func (p *Provider) authorize(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	back, err := url.Parse(q.Get("redirect_uri"))
	switch {
	case err != nil || back.Scheme != "http" || back.Hostname() != "127.0.0.1":
		http.Error(w, "redirect_uri is not on the loopback", http.StatusBadRequest)
		return
	case q.Get("client_id") != p.ClientID || q.Get("response_type") != "code" || !strings.Contains(" "+q.Get("scope")+" ", " openid ") ||
		q.Get("state") == "" || q.Get("nonce") == "" || q.Get("code_challenge_method") != "S256" || len(q.Get("code_challenge")) != 43:
		http.Error(w, "the request is not what a client sends", http.StatusBadRequest)
		return
	}
	code := rand.Text()
	p.mu.Lock()
	p.asked[code], p.last = q, q
	p.mu.Unlock()
	to := url.Values{"code": {code}, "state": {q.Get("state")}}
	if p.Redirect != nil {
		p.Redirect(to)
	}
	back.RawQuery = to.Encode()
	http.Redirect(w, r, back.String(), http.StatusSeeOther)
}

func (p *Provider) token(w http.ResponseWriter, r *http.Request) {
	if p.Token != nil {
		p.Token(w, r)
		return
	}
	refuse := func(code string) { answer(w, http.StatusBadRequest, map[string]any{"error": code}) }
	if err := r.ParseForm(); err != nil || r.PostForm.Get("grant_type") != "authorization_code" || r.PostForm.Has("client_secret") {
		refuse("invalid_request")
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	asked, ok := p.asked[r.PostForm.Get("code")]
	delete(p.asked, r.PostForm.Get("code")) // a code can be used once
	sum := sha256.Sum256([]byte(r.PostForm.Get("code_verifier")))
	if !ok || r.PostForm.Get("client_id") != p.ClientID || r.PostForm.Get("redirect_uri") != asked.Get("redirect_uri") ||
		base64.RawURLEncoding.EncodeToString(sum[:]) != asked.Get("code_challenge") {
		refuse("invalid_grant")
		return
	}
	claims := map[string]any{
		"iss": p.Issuer, "sub": p.Subject, "aud": p.ClientID, "nonce": asked.Get("nonce"),
		"iat": p.Now.Unix(), "exp": p.Now.Add(5 * time.Minute).Unix(),
	}
	if p.Claims != nil {
		p.Claims(claims)
	}
	id, err := p.sign(claims)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	p.issued = append(p.issued, id)
	answer(w, http.StatusOK, map[string]any{"access_token": rand.Text(), "token_type": "Bearer", "expires_in": 300, "id_token": id})
}

func (p *Provider) sign(claims map[string]any) (string, error) {
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: p.key, KeyID: "1"}}, nil)
	if err != nil {
		return "", fmt.Errorf("sign: %w", err)
	}
	return jwt.Signed(signer).Claims(claims).Serialize()
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // fails if the client has disconnected, which does not matter
}

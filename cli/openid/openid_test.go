package openid

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/cli/openid/openidtest"
)

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// browser opens an address and follows redirects, as a user's browser does. It returns the last page and its response.
func browser(t *testing.T, address string) (page string, resp *http.Response) {
	resp, err := http.Get(address)
	if !assertNoError(t, err) {
		return "", nil
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	assertNoError(t, err)
	return string(text), resp
}

func assertNoError(t *testing.T, err error) bool {
	if err != nil {
		t.Error(err) // not require, which must not be called from another goroutine
	}
	return err == nil
}

// prove runs Prove and calls person, in another goroutine, with the address that Prove shows to the user.
func prove(t *testing.T, p *openidtest.Provider, person func(ctx context.Context, address string)) (*Proof, error) {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	return Prove(ctx, Provider{Issuer: p.Issuer, ClientID: p.ClientID, Scopes: []string{"email"}}, Options{
		Now: func() time.Time { return now }, Show: func(address string) { wg.Go(func() { person(ctx, address) }) },
	})
}

func TestLogin(t *testing.T) {
	p := openidtest.New(t, now)
	var page string
	var resp *http.Response
	proof, err := prove(t, p, func(_ context.Context, address string) { page, resp = browser(t, address) })
	require.NoError(t, err)
	require.Equal(t, p.Issued(), []string{string(proof.IDToken)})
	asked := p.Asked()
	require.Equal(t, asked.Get("nonce"), proof.Nonce)
	require.Equal(t, "openid email", asked.Get("scope"))

	require.Contains(t, page, "you can close this")
	code := resp.Request.URL.Query().Get("code")
	require.NotEmpty(t, code)
	for _, secret := range []string{code, string(proof.IDToken), asked.Get("state"), proof.Nonce} {
		require.NotContains(t, page, secret)
	}
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Equal(t, "no-store", resp.Header.Get("Cache-Control"))
	require.Equal(t, "no-referrer", resp.Header.Get("Referrer-Policy"))
	require.Equal(t, "default-src 'none'", resp.Header.Get("Content-Security-Policy"))
	// The program must have closed its port.
	_, err = http.Get(resp.Request.URL.String())
	require.Error(t, err)
}

// TestRedirectWithForeignStateIsIgnored checks that redirects without the state of this login, or to another path,
// neither complete nor end the login.
func TestRedirectWithForeignStateIsIgnored(t *testing.T) {
	p := openidtest.New(t, now)
	proof, err := prove(t, p, func(_ context.Context, address string) {
		u, err := url.Parse(address)
		assertNoError(t, err)
		back := u.Query().Get("redirect_uri")
		for _, query := range []string{"?code=evil&state=evil", "?code=evil", "?error=access_denied&state=", "", "?%zz", "/other?state=" + u.Query().Get("state")} {
			page, resp := browser(t, back+query)
			if resp.StatusCode != http.StatusNotFound || strings.Contains(page, "evil") {
				t.Errorf("%s gave %d: %s", query, resp.StatusCode, page)
			}
		}
		resp, err := http.Post(back+"?code=evil&state="+u.Query().Get("state"), "text/plain", nil)
		if assertNoError(t, err) {
			resp.Body.Close()
		}
		browser(t, address)
	})
	require.NoError(t, err)
	require.Equal(t, p.Issued(), []string{string(proof.IDToken)})
}

func TestFailedLoginShowsReasonAndNoToken(t *testing.T) {
	const leak = "eyJ.leaked.token"
	for name, tc := range map[string]struct {
		change func(*openidtest.Provider)
		want   string
	}{
		"login refused by the user": {func(p *openidtest.Provider) {
			p.Redirect = func(v url.Values) {
				v.Del("code")
				v.Set("error", "access_denied")
				v.Set("error_description", "no\nthanks")
			}
		}, `the provider refused the login: "access_denied" "no\nthanks"`},
		"neither code nor error": {func(p *openidtest.Provider) { p.Redirect = func(v url.Values) { v.Del("code") } }, "sent no code"},
		"another code":           {func(p *openidtest.Provider) { p.Redirect = func(v url.Values) { v.Set("code", leak) } }, `it answered "invalid_grant"`},
		"ID token with the nonce of another login": {func(p *openidtest.Provider) {
			p.Claims = func(c map[string]any) { c["nonce"] = "other" }
		}, "not for this login"},
		"ID token without a nonce":    {func(p *openidtest.Provider) { p.Claims = func(c map[string]any) { delete(c, "nonce") } }, "not for this login"},
		"ID token for another client": {func(p *openidtest.Provider) { p.Claims = func(c map[string]any) { c["aud"] = "other" } }, "audience"},
		"ID token of another issuer":  {func(p *openidtest.Provider) { p.Claims = func(c map[string]any) { c["iss"] = "https://other" } }, "issued by a different provider"},
		"expired": {func(p *openidtest.Provider) {
			p.Claims = func(c map[string]any) { c["exp"] = now.Add(-time.Hour).Unix() }
		}, "expired"},
		"no ID token": {func(p *openidtest.Provider) {
			p.Token = say(200, `{"access_token":"`+leak+`","token_type":"Bearer"}`)
		}, "has no ID token"},
		"an invalid ID token": {func(p *openidtest.Provider) {
			p.Token = say(200, `{"access_token":"x","token_type":"Bearer","id_token":"`+leak+`"}`)
		}, "check the provider's ID token"},
		"an error with a token in it": {func(p *openidtest.Provider) { p.Token = say(500, leak) }, "it answered 500"},
		"an error response with a description": {func(p *openidtest.Provider) {
			p.Token = say(400, `{"error":"invalid_client","error_description":"`+leak+`"}`)
		}, `it answered "invalid_client"`},
		"a response without end": {func(p *openidtest.Provider) { p.Token = say(200, strings.Repeat(" ", maxBody+1)+"{}") }, "get a token from the provider"},
		"a configuration without end": {func(p *openidtest.Provider) {
			p.Configuration = func(c map[string]any) { c["service_documentation"] = strings.Repeat("x", maxBody) }
		}, "read the provider's configuration"},
		"a redirect of the token endpoint": {func(p *openidtest.Provider) {
			p.Token = func(w http.ResponseWriter, r *http.Request) {
				http.Redirect(w, r, p.Issuer+"/keys", http.StatusTemporaryRedirect)
			}
		}, "not followed"},
		"a token endpoint without https": {func(p *openidtest.Provider) {
			p.Configuration = func(c map[string]any) { c["token_endpoint"] = "http://example.com/token" }
		}, "the token endpoint of the provider is not an https address"},
		"an authorization endpoint without https": {func(p *openidtest.Provider) {
			p.Configuration = func(c map[string]any) { c["authorization_endpoint"] = "http://example.com/authorize" }
		}, "the authorization endpoint of the provider is not an https address"},
		"a key endpoint without https": {func(p *openidtest.Provider) {
			p.Configuration = func(c map[string]any) { c["jwks_uri"] = "http://example.com/keys" }
		}, "the keys of the provider is not an https address"},
		"a configuration of another issuer": {func(p *openidtest.Provider) {
			p.Configuration = func(c map[string]any) { c["issuer"] = "https://other" }
		}, "read the provider's configuration"},
	} {
		t.Run(name, func(t *testing.T) {
			p := openidtest.New(t, now)
			tc.change(p)
			_, err := prove(t, p, func(_ context.Context, address string) {
				page, _ := browser(t, address)
				if !strings.Contains(page, "you can close this") || strings.Contains(page, "thanks") {
					t.Errorf("the page is %s", page)
				}
			})
			require.ErrorContains(t, err, tc.want)
			require.NotContains(t, err.Error(), leak)
			require.Less(t, len(err.Error()), 1000)
		})
	}
}

func say(status int, text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, text) // fails if the client has closed the connection, which does not matter
	}
}

func TestLoginTimesOut(t *testing.T) {
	p := openidtest.New(t, now)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := Prove(ctx, Provider{Issuer: p.Issuer, ClientID: p.ClientID}, Options{Show: func(string) { cancel() }})
	require.ErrorIs(t, err, context.Canceled)

	ctx, cancel = context.WithTimeout(t.Context(), 0)
	defer cancel()
	back := &redirect{came: make(chan came), done: make(chan struct{})}
	_, err = back.wait(ctx)
	require.ErrorContains(t, err, "--timeout gives it longer")
}

func TestUnsafeAddressesAreRefused(t *testing.T) {
	for _, good := range []string{"https://login.example.com/realms/x", "http://127.0.0.1:5556/dex", "http://[::1]:1", "http://localhost:5556"} {
		require.NoError(t, safe("it", good), good)
	}
	for _, bad := range []string{"", "http://example.com", "http://127.0.0.1.example.com", "ftp://x", "https://", "//x", "https://user:pw@x", "http://localhost.example.com", "\x00"} {
		require.Error(t, safe("it", bad), bad)
	}
	_, err := Prove(t.Context(), Provider{Issuer: "http://login.example.com"}, Options{})
	require.ErrorContains(t, err, "not an https address")
}

// Package openid gets an ID token from an OpenID provider with the authorization code flow for public clients, with
// PKCE (RFC 7636, S256) and a redirect to loopback (RFC 8252 section 7.3). It makes no calls to the control plane.
// Decisions:
//
//   - The page in the browser shows no token and no code. Errors of the provider are shown in the terminal only.
//   - A redirect with an unknown state is ignored, because any web page can send a browser to this port.
//   - Errors contain the error code of the provider's response, but not its body, which may contain a token.
package openid

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"golang.org/x/oauth2"

	"github.com/trivet-cloud/trivet/cli/account"
)

const (
	// maxBody is the maximum size in bytes of a response of the provider; a longer one is an error.
	maxBody = 1 << 20
	// request is the timeout of one HTTP request to the provider.
	request = 15 * time.Second
	path    = "/callback"
)

// Provider is an OpenID provider. ClientID is the ID under which Trivet is registered there.
type Provider struct {
	Issuer, ClientID string
	// Scopes lists the OAuth scopes that are requested in addition to "openid".
	Scopes []string
}

// Options holds the options of Prove.
type Options struct {
	// Port is the port on loopback to which the provider redirects the browser, for providers that accept only a
	// registered port; 0 means any free port.
	Port uint16
	// Show prints the URL that the user must open in a browser. Required.
	Show func(address string)
	// Now returns the time at which the ID token must be valid. Optional; the default is the current time.
	Now func() time.Time
}

// Proof is the result of a login at a provider.
type Proof struct {
	IDToken account.Secret
	// Nonce is the value of the ID token's claim "nonce", which belongs to this login only.
	Nonce string
}

// Prove prints a URL with opts.Show, waits until the user has logged in there with a browser, and returns the ID token.
// It returns an error if the login fails or ctx ends.
func Prove(ctx context.Context, p Provider, opts Options) (*Proof, error) {
	if err := safe("the issuer", p.Issuer); err != nil {
		return nil, err
	}
	ctx = oidc.ClientContext(ctx, client())
	provider, err := oidc.NewProvider(ctx, p.Issuer)
	if err != nil {
		return nil, fmt.Errorf("read the provider's configuration: %w", without(err))
	}
	at := provider.Endpoint()
	var keys struct {
		URL string `json:"jwks_uri"`
	}
	if err := provider.Claims(&keys); err != nil {
		return nil, fmt.Errorf("read the provider's configuration: %w", without(err))
	}
	if err := cmp.Or(safe("the authorization endpoint", at.AuthURL), safe("the token endpoint", at.TokenURL), safe("the keys", keys.URL)); err != nil {
		return nil, err
	}
	// A public client has no secret, and sends its ID as a parameter of the token request.
	at.AuthStyle = oauth2.AuthStyleInParams

	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(opts.Port))))
	if err != nil {
		return nil, fmt.Errorf("wait for the browser: %w", err)
	}
	config := &oauth2.Config{
		ClientID: p.ClientID, Endpoint: at, RedirectURL: "http://" + listener.Addr().String() + path, Scopes: scopes(p.Scopes),
	}
	state, nonce, verifier := rand.Text(), rand.Text(), oauth2.GenerateVerifier()
	back := listen(listener, state)
	defer back.close()
	opts.Show(config.AuthCodeURL(state, oidc.Nonce(nonce), oauth2.S256ChallengeOption(verifier)))
	code, err := back.wait(ctx)
	if err != nil {
		return nil, err
	}
	token, err := config.Exchange(ctx, code, oauth2.VerifierOption(verifier))
	if err != nil {
		return nil, fmt.Errorf("get a token from the provider: %w", without(err))
	}
	raw, ok := token.Extra("id_token").(string)
	if !ok || raw == "" {
		return nil, errors.New("get a token from the provider: the response has no ID token")
	}
	// The control plane verifies the ID token too. Verify here that the token was issued for this login.
	id, err := provider.VerifierContext(ctx, &oidc.Config{ClientID: p.ClientID, Now: opts.Now}).Verify(ctx, raw)
	if err != nil {
		return nil, fmt.Errorf("check the provider's ID token: %w", without(err))
	}
	if id.Nonce != nonce {
		return nil, errors.New("check the provider's ID token: it is not for this login")
	}
	return &Proof{IDToken: account.Secret(raw), Nonce: nonce}, nil
}

func scopes(asked []string) []string {
	if slices.Contains(asked, oidc.ScopeOpenID) {
		return asked
	}
	return append([]string{oidc.ScopeOpenID}, asked...)
}

// safe returns an error unless address is an https URL, or an http URL on loopback. The parameter named what describes
// the address in the error.
func safe(what, address string) error {
	u, err := url.Parse(address)
	if err == nil && u.Host != "" && u.User == nil {
		ip, notIP := netip.ParseAddr(u.Hostname())
		if u.Scheme == "https" || u.Scheme == "http" && (u.Hostname() == "localhost" || notIP == nil && ip.IsLoopback()) {
			return nil
		}
	}
	return fmt.Errorf("%s of the provider is not an https address: %q", what, address)
}

// client returns an HTTP client that limits the time and size of responses, and returns an error for a redirect.
func client() *http.Client {
	return &http.Client{
		Timeout: request, Transport: bounded{http.DefaultTransport},
		CheckRedirect: func(*http.Request, []*http.Request) error { return errors.New("it redirects, which is not followed") },
	}
}

type bounded struct{ http.RoundTripper }

func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := b.RoundTripper.RoundTrip(r)
	if err == nil {
		resp.Body = struct {
			io.Reader
			io.Closer
		}{http.MaxBytesReader(nil, resp.Body, maxBody), resp.Body}
	}
	return resp, err
}

// without returns an error that has the meaning of err, but does not contain the body of the provider's response.
func without(err error) error {
	var refused *oauth2.RetrieveError
	if errors.Is(err, context.Canceled) {
		return err
	}
	if errors.As(err, &refused) {
		if refused.ErrorCode == "" {
			return fmt.Errorf("it answered %d", refused.Response.StatusCode)
		}
		return fmt.Errorf("it answered %q", clip(refused.ErrorCode))
	}
	return errors.New(clip(err.Error()))
}

// clip shortens text from the provider or the browser to 300 bytes.
func clip(text string) string {
	if len(text) > 300 {
		return text[:300] + "..."
	}
	return text
}

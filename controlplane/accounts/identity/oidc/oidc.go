// Package oidc verifies the ID tokens of external OpenID providers (OpenID Connect Core 1.0 part 3.1.3.7). It does not
// depend on users: package identity maps an external identity to a user.
//
// The keys of a provider are fetched when they are first needed, and again when a token names an unknown key. If a
// provider does not respond, its users get Unavailable; others are not affected.
package oidc

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// Provider configures an OpenID provider whose ID tokens Trivet accepts.
type Provider struct {
	// Name is the provider's name in Trivet.
	Name string `yaml:"name"`
	// Issuer is the provider's URL, below which its discovery document is found. The scheme must be https; http is
	// allowed on loopback.
	Issuer string `yaml:"issuer"`
	// ClientID is the audience of the ID tokens that the provider issues for Trivet.
	ClientID string `yaml:"client_id"`
	// Scopes are the OAuth scopes that clients request in addition to openid.
	Scopes []string `yaml:"scopes"`
}

var name = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)

// Check returns an error if a field is missing or malformed, or if the issuer uses http and is not on loopback.
func (p *Provider) Check() error {
	u, err := url.Parse(p.Issuer)
	switch {
	case !name.MatchString(p.Name):
		return fmt.Errorf("name %q must be 1 to 32 of a-z, 0-9 and -, starting with a letter", p.Name)
	case err != nil || u.Host == "" || u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("issuer %q of %s is not a URL", p.Issuer, p.Name)
	case u.Scheme != "https" && !(u.Scheme == "http" && slices.Contains([]string{"127.0.0.1", "::1", "localhost"}, u.Hostname())):
		return fmt.Errorf("issuer %q of %s must be https, because its keys are trusted", p.Issuer, p.Name)
	case p.ClientID == "":
		return fmt.Errorf("client_id of %s is required", p.Name)
	}
	return nil
}

const (
	// askTime is the timeout of a request to a provider.
	askTime = 10 * time.Second
	// maxText is the maximum length of an ID token, in bytes.
	maxText = 16 << 10
	// askAgain is the minimum time between a failed request to a provider and the next request to it.
	askAgain = 5 * time.Second
)

// Providers verifies the ID tokens of all configured providers.
type Providers struct {
	list   []Provider
	client *http.Client
	known  map[string]*known
}

// known is the state of one provider. It contains the provider's verifier if discovery has succeeded, and the error and
// the time of the last failed discovery otherwise.
type known struct {
	mu       sync.Mutex
	verifier *oidc.IDTokenVerifier
	failed   error
	since    time.Time
}

// New returns Providers for a list of configurations that have passed Check.
func New(list []Provider) *Providers {
	p := &Providers{list: list, client: &http.Client{Timeout: askTime, Transport: bounded{http.DefaultTransport}}, known: map[string]*known{}}
	for _, one := range list {
		p.known[one.Name] = &known{}
	}
	return p
}

// List returns the configurations that were given to New.
func (p *Providers) List() []Provider { return p.list }

// Has reports whether there is a provider with this name.
func (p *Providers) Has(name string) bool { return p.known[name] != nil }

// Issuer returns the issuer of the provider with this name, or "".
func (p *Providers) Issuer(name string) string {
	for _, one := range p.list {
		if one.Name == name {
			return one.Issuer
		}
	}
	return ""
}

// Subject verifies an ID token of the given provider and returns its subject. If nonce is not empty, the token must
// contain the same nonce. Subject returns Unauthenticated for an invalid token, and Unavailable if the provider does
// not respond.
func (p *Providers) Subject(ctx context.Context, provider, text, nonce string, now func() time.Time) (string, error) {
	i := slices.IndexFunc(p.list, func(o Provider) bool { return o.Name == provider })
	if i < 0 {
		return "", fault.Invalid("provider", "there is no login provider %q", provider)
	}
	if text == "" || len(text) > maxText {
		return "", fault.Invalid("id_token", "must be 1 to %d bytes", maxText)
	}
	verifier, err := p.verifier(ctx, &p.list[i], now)
	if err != nil {
		return "", err
	}
	token, err := verifier.Verify(oidc.ClientContext(ctx, p.client), text)
	if err != nil {
		var expired *oidc.TokenExpiredError
		switch {
		case errors.As(err, &expired):
			return "", fault.New(fault.Unauthenticated, "the ID token of %s has expired", provider)
		case unreachable(err):
			return "", unavailable(provider, err)
		}
		return "", fault.New(fault.Unauthenticated, "the ID token of %s is not valid", provider).Because(err)
	}
	var more struct {
		AuthorizedParty string `json:"azp"`
	}
	if err := token.Claims(&more); err != nil || more.AuthorizedParty != "" && more.AuthorizedParty != p.list[i].ClientID {
		return "", fault.New(fault.Unauthenticated, "the ID token of %s was made for another program", provider)
	}
	if token.Subject == "" || nonce != "" && token.Nonce != nonce {
		return "", fault.New(fault.Unauthenticated, "the ID token of %s was made for another login", provider)
	}
	return token.Subject, nil
}

func unavailable(provider string, err error) error {
	return fault.New(fault.Unavailable, "the login provider %s cannot be reached now: try again", provider).Because(err).MayRetry()
}

// unreachable reports whether a verification failed because keys could not be fetched. go-oidc reports that only in the
// error's text.
func unreachable(err error) bool {
	var u *url.Error
	return errors.As(err, &u) || strings.Contains(err.Error(), "fetching keys")
}

// verifier returns the verifier of a provider, and runs discovery on first use.
func (p *Providers) verifier(ctx context.Context, one *Provider, now func() time.Time) (*oidc.IDTokenVerifier, error) {
	k := p.known[one.Name]
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.verifier != nil {
		return k.verifier, nil
	}
	if k.failed != nil && time.Since(k.since) < askAgain {
		return nil, unavailable(one.Name, k.failed)
	}
	asking, cancel := context.WithTimeout(oidc.ClientContext(ctx, p.client), askTime)
	defer cancel()
	// The verifier also fetches keys after this call has returned, so it must not use the context of this call.
	provider, err := oidc.NewProvider(asking, one.Issuer)
	if err != nil {
		if ctx.Err() == nil {
			k.failed, k.since = err, time.Now()
		}
		return nil, unavailable(one.Name, err)
	}
	k.verifier = provider.VerifierContext(oidc.ClientContext(context.WithoutCancel(ctx), p.client), &oidc.Config{ClientID: one.ClientID, Now: now})
	return k.verifier, nil
}

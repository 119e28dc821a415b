// Package outside asks OpenID providers of others who somebody is: it checks the ID tokens that they issue (OpenID Connect
// Core 1.0 part 3.1.3.7). It knows no users: who an identity stands for here is package identity's.
//
// A provider is asked for its keys when it is first needed, and again when a token names one that is not known. One that
// does not answer is Unavailable, for its users only.
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

// Provider is one that is believed.
type Provider struct {
	// Name is what it is called here.
	Name string `yaml:"name"`
	// Issuer is its URL, below which its discovery document is found. https, or http on loopback.
	Issuer string `yaml:"issuer"`
	// ClientID is the audience of the ID tokens that it issues for us.
	ClientID string `yaml:"client_id"`
	// Scopes are asked for beside openid.
	Scopes []string `yaml:"scopes"`
}

var name = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)

// Check says what is wrong with a provider's configuration.
func (p *Provider) Check() error {
	u, err := url.Parse(p.Issuer)
	switch {
	case !name.MatchString(p.Name):
		return fmt.Errorf("name %q must be 1 to 32 of a-z, 0-9 and -, starting with a letter", p.Name)
	case err != nil || u.Host == "" || u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("issuer %q of %s is not a URL", p.Issuer, p.Name)
	case u.Scheme != "https" && !(u.Scheme == "http" && slices.Contains([]string{"127.0.0.1", "::1", "localhost"}, u.Hostname())):
		return fmt.Errorf("issuer %q of %s must be https: its keys are believed", p.Issuer, p.Name)
	case p.ClientID == "":
		return fmt.Errorf("client_id of %s is required", p.Name)
	}
	return nil
}

const (
	// askTime bounds what a provider may take to answer.
	askTime = 10 * time.Second
	// maxText is the limit of an ID token in bytes.
	maxText = 16 << 10
	// askAgain is how long a provider that did not answer is left alone.
	askAgain = 5 * time.Second
)

// Providers are all that are believed.
type Providers struct {
	list   []Provider
	client *http.Client
	known  map[string]*known
}

type known struct {
	mu       sync.Mutex
	verifier *oidc.IDTokenVerifier
	failed   error
	since    time.Time
}

// New makes the set. The configurations must be checked.
func New(list []Provider) *Providers {
	p := &Providers{list: list, client: &http.Client{Timeout: askTime, Transport: bounded{http.DefaultTransport}}, known: map[string]*known{}}
	for _, one := range list {
		p.known[one.Name] = &known{}
	}
	return p
}

// List is the providers.
func (p *Providers) List() []Provider { return p.list }

// Has reports whether there is a provider of a name.
func (p *Providers) Has(name string) bool { return p.known[name] != nil }

// Issuer is a provider's, by its name here.
func (p *Providers) Issuer(name string) string {
	for _, one := range p.list {
		if one.Name == name {
			return one.Issuer
		}
	}
	return ""
}

// Subject is whom a provider's ID token names. Unauthenticated when it is not good, Unavailable when the provider cannot
// be asked. A nonce that is not empty must be the token's.
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
		return "", fault.New(fault.Unauthenticated, "the ID token is not a good one of %s", provider).Because(err)
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
	return fault.New(fault.Unavailable, "the login provider %s cannot be asked just now", provider).Because(err).MayRetry()
}

// unreachable reports whether a verification failed since keys could not be fetched, as go-oidc says it.
func unreachable(err error) bool {
	var u *url.Error
	return errors.As(err, &u) || strings.Contains(err.Error(), "fetching keys")
}

// verifier asks a provider for its keys, once.
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
	// The key set that follows outlives the call.
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

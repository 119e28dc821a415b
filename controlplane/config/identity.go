package config

import (
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/oidc"
)

// Identity configures ID tokens and external identity providers.
type Identity struct {
	// Issuer is the issuer URL of ID tokens. Verifiers find the signing keys under it, so it should lead to any of the
	// members, for example through a load balancer. Empty means the address of each member itself.
	Issuer string `yaml:"issuer"`
	// Providers lists OpenID providers. Their users may log in once an operator has linked them with users of Trivet.
	Providers []oidc.Provider `yaml:"providers"`
}

func (i *Identity) validate() error {
	if i.Issuer != "" {
		u, err := url.Parse(i.Issuer)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" || strings.HasSuffix(i.Issuer, "/") {
			return fmt.Errorf("identity.issuer: %q is not a URL without a slash at its end", i.Issuer)
		}
	}
	seen := map[string]bool{}
	for _, p := range i.Providers {
		if err := p.Check(); err != nil {
			return fmt.Errorf("identity.providers: %w", err)
		}
		if seen[p.Name] {
			return fmt.Errorf("identity.providers: %s is listed twice", p.Name)
		}
		seen[p.Name] = true
	}
	return nil
}

// CredentialFreeHosts returns the host names that requests may use at REST endpoints that need no credential:
// REST.Hosts and the host of Identity.Issuer.
func (c *Config) CredentialFreeHosts() []string {
	if u, err := url.Parse(c.Identity.Issuer); err == nil && u.Hostname() != "" {
		return append(slices.Clone(c.REST.Hosts), u.Hostname())
	}
	return c.REST.Hosts
}

// IssuerURL returns Identity.Issuer or, if it is empty, the URL of this member's identity port.
func (c *Config) IssuerURL() string {
	if c.Identity.Issuer != "" {
		return c.Identity.Issuer
	}
	return c.TLS.Scheme() + "://" + net.JoinHostPort(c.Listen, strconv.Itoa(int(c.Ports.Identity)))
}

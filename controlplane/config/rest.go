package config

import (
	"fmt"
	"slices"
)

// REST configures the REST endpoints that need no credential.
type REST struct {
	// Open lists the services whose REST API serves callers on other hosts without a credential. Possible services are
	// kv, and identity for its users and projects.
	Open []string `yaml:"open"`
	// Hosts lists further host names that requests without a credential may use over plaintext. IP addresses, localhost
	// and the host of the issuer are always allowed. Other names are refused, because a web page may have made such a
	// name resolve to this address (DNS rebinding).
	Hosts []string `yaml:"hosts"`
}

// openable lists the services that may be in REST.Open.
var openable = []string{"kv", "identity"}

func (r *REST) validate() error {
	for _, name := range r.Open {
		if !slices.Contains(openable, name) {
			return fmt.Errorf("rest.open: %q is not one of %v", name, openable)
		}
	}
	return nil
}

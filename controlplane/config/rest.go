package config

import (
	"fmt"
	"slices"
)

// REST configures the endpoints that need no credential.
type REST struct {
	// Open lists the services that answer callers beyond loopback without a credential: kv, and identity for its users
	// and projects.
	Open []string `yaml:"open"`
	// Hosts lists host names that requests without a credential may use over plaintext, in addition to IP addresses,
	// localhost and the host of the issuer. Requests with other names are refused, because a web page may have bound such
	// a name to this address (DNS rebinding).
	Hosts []string `yaml:"hosts"`
}

// openable lists the values that Open may have.
var openable = []string{"kv", "identity"}

func (r *REST) validate() error {
	for _, name := range r.Open {
		if !slices.Contains(openable, name) {
			return fmt.Errorf("rest.open: %q is not one of %v", name, openable)
		}
	}
	return nil
}

package main

import (
	"crypto/tls"
	"strconv"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/clock"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// memberCertificateLife is the lifetime of the certificate that a member issues to itself. The member renews it after
// half of this time.
const memberCertificateLife = 30 * 24 * time.Hour

// memberCertificate returns the source of this member's certificate. The source issues the certificate with the
// cluster's authority and renews it in time.
func memberCertificate(authority *mtls.Authority, member uint64, now func() time.Time) mtls.Source {
	var mu sync.Mutex
	var current *tls.Certificate
	return func() (*tls.Certificate, error) {
		mu.Lock()
		defer mu.Unlock()
		if now := now(); current == nil || now.After(current.Leaf.NotAfter.Add(-memberCertificateLife/2)) {
			c, err := authority.IssueFor(mtls.Member, strconv.FormatUint(member, 10), now, memberCertificateLife)
			if err != nil {
				return nil, err
			}
			current = c
		}
		return current, nil
	}
}

// withAuthorityCertificate returns a source that appends the authority's certificate to the chain, for agents that know
// only the hash of that certificate.
func withAuthorityCertificate(source mtls.Source, authority *mtls.Authority) mtls.Source {
	return func() (*tls.Certificate, error) {
		c, err := source()
		if err != nil {
			return nil, err
		}
		return mtls.WithAuthority(c, authority.Certificate()), nil
	}
}

// withClock makes config check the validity period of certificates against the member's clock c, and returns config.
func withClock(c *clock.Clock, config *tls.Config) *tls.Config {
	config.Time = c.Now
	return config
}

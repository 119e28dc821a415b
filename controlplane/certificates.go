package main

import (
	"crypto/tls"
	"log/slog"
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
func memberCertificate(authority *mtls.Authority, member uint64, now func() time.Time, log *slog.Logger) mtls.Source {
	return renewedCertificate(func(now time.Time) (*tls.Certificate, error) {
		return authority.IssueFor(mtls.Member, strconv.FormatUint(member, 10), now, memberCertificateLife)
	}, now, log)
}

// renewedCertificate returns a source that calls issue for a certificate, and again after half of memberCertificateLife.
// If the renewal fails, the source returns the old certificate until it expires, and each call tries the renewal again:
// the operator has the other half of its life to repair the cause.
func renewedCertificate(
	issue func(now time.Time) (*tls.Certificate, error), now func() time.Time, log *slog.Logger,
) mtls.Source {
	var mu sync.Mutex
	var current *tls.Certificate
	var warned bool // a failure of the current renewal has been logged
	return func() (*tls.Certificate, error) {
		mu.Lock()
		defer mu.Unlock()
		now := now()
		if current != nil && !now.After(current.Leaf.NotAfter.Add(-memberCertificateLife/2)) {
			return current, nil
		}
		switch c, err := issue(now); {
		case err == nil:
			current, warned = c, false
		case current == nil || mtls.Expired(current.Leaf, now):
			return nil, err
		case !warned:
			log.Error("the certificate of this member cannot be renewed; the old one stays in use",
				"err", err, "until", current.Leaf.NotAfter)
			warned = true
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

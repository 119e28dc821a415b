package main

import (
	"crypto/tls"
	"strconv"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/clock"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// memberCertificateLife is the life of a member's own certificate, which it signs anew at half of it.
const memberCertificateLife = 30 * 24 * time.Hour

// memberCertificate signs this member's certificate, and a new one at half its life.
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

// withAuthorityCertificate shows the authority beside the leaf, for agents that hold only its pin.
func withAuthorityCertificate(source mtls.Source, authority *mtls.Authority) mtls.Source {
	return func() (*tls.Certificate, error) {
		c, err := source()
		if err != nil {
			return nil, err
		}
		return mtls.WithAuthority(c, authority.Certificate()), nil
	}
}

// withClock makes a listener judge certificates by the member's time.
func withClock(c *clock.Clock, config *tls.Config) *tls.Config {
	config.Time = c.Now
	return config
}

package main

import (
	"crypto/tls"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// testCertificate returns the source of the certificate of a member.
func testCertificate(authority *mtls.Authority, member uint64) mtls.Source {
	return memberCertificate(authority, member, time.Now, slog.New(slog.DiscardHandler))
}

// TestMemberCertificateIsRenewed checks that a member renews its certificate after half of its life. If the renewal
// fails, the member must use the old certificate until it expires, and export its expiry, from which the alert rule
// TrivetMemberCertificateExpires computes that the renewal is overdue.
func TestMemberCertificateIsRenewed(t *testing.T) {
	authority, err := clusterkey.Generate().Authority()
	require.NoError(t, err)
	began := time.Now()
	now := began
	var failure error
	source := renewedCertificate(func(now time.Time) (*tls.Certificate, error) {
		if failure != nil {
			return nil, failure
		}
		return authority.IssueFor(mtls.Member, "1", now, memberCertificateLife)
	}, func() time.Time { return now }, slog.New(slog.DiscardHandler))
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(&certificateCollector{source})
	expiry := func() float64 {
		families, err := registry.Gather()
		require.NoError(t, err)
		require.Len(t, families, 1)
		require.Equal(t, "trivet_member_certificate_expiry_timestamp_seconds", families[0].GetName())
		return families[0].GetMetric()[0].GetGauge().GetValue()
	}
	const day = 24 * time.Hour
	first := float64(began.Add(30 * day).Unix())
	require.Equal(t, first, expiry())
	now = began.Add(15*day - time.Minute)
	require.Equal(t, first, expiry())

	failure = errors.New("no random numbers")
	now = began.Add(30*day - time.Minute)
	require.Equal(t, first, expiry(), "a certificate that was not renewed must be used until it expires")
	now = began.Add(30*day + time.Minute)
	_, err = source()
	require.ErrorIs(t, err, failure)

	failure = nil
	require.Equal(t, float64(now.Add(30*day).Unix()), expiry())
}

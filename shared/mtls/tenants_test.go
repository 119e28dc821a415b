package mtls

import (
	"crypto/tls"
	"crypto/x509"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func tenants(t *testing.T, a *Authority, hosts ...string) *tls.Certificate {
	c, err := a.IssueTenants(hosts, time.Now(), time.Hour)
	require.NoError(t, err)
	return c
}

func source(c *tls.Certificate) Source { return func() (*tls.Certificate, error) { return c, nil } }

// TestTenantsCertificateAtEveryPort checks that no internal port accepts a certificate of kind Tenants from a client,
// that no member or agent accepts it from a server, and that certificates of internal ports do not verify for a
// tenant's client.
func TestTenantsCertificateAtEveryPort(t *testing.T) {
	now := time.Now()
	ours := authority(t, "ours", 1)
	edge := tenants(t, ours, "cloud.example.org", "10.0.0.1")
	member, node := issued(t, ours, Member, "1", now, time.Hour), issued(t, ours, Node, "n1", now, time.Hour)

	for name, port := range map[string]*tls.Config{
		"peers":  Server(member, ours.Certificate(), OnlyKind(Member)),
		"agents": ServerOptional(member, ours.Certificate(), OnlyKind(Node), 24*time.Hour),
		// A port that accepts the kind Tenants refuses the certificate too, because its key usage is not for clients.
		"lax": Server(member, ours.Certificate(), OnlyKind(Tenants)),
	} {
		serverErr, clientErr := handshake(t, port, Client(source(edge), ours.Certificate(), OnlyKind(Member)))
		require.Error(t, serverErr, name)
		require.Error(t, clientErr, name)
	}
	pretends := &tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		return WithAuthority(edge, ours.Certificate()), nil
	}}
	for name, client := range map[string]*tls.Config{
		"member": Client(member, ours.Certificate(), OnlyKind(Member)), "agent": Client(node, ours.Certificate(), OnlyKind(Member)),
		"joining agent": ClientPinned(Pin(ours.Certificate())),
	} {
		_, err := handshake(t, pretends, client)
		require.ErrorContains(t, err, "want a member", name)
	}

	roots := x509.NewCertPool()
	roots.AddCert(ours.Certificate())
	for name, show := range map[string]Source{"tenants": source(edge), "member": member, "node": node} {
		server := &tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return show() }}
		for host, named := range map[string]bool{"cloud.example.org": true, "10.0.0.1": true, "10.0.0.2": false} {
			_, err := handshake(t, server, &tls.Config{RootCAs: roots, ServerName: host})
			if name == "tenants" && named {
				require.NoError(t, err, host)
			} else {
				require.Error(t, err, "%s as %s", name, host)
			}
		}
	}
}

func TestTenantsCertificateNamesHosts(t *testing.T) {
	a := authority(t, "ours", 1)
	c := tenants(t, a, "a.example.org", "*.b.example.org", "localhost", "10.0.0.1", "::1").Leaf
	require.Equal(t, []string{"a.example.org", "*.b.example.org", "localhost"}, c.DNSNames)
	require.Len(t, c.IPAddresses, 2)
	require.Equal(t, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, c.ExtKeyUsage)
	require.False(t, c.IsCA)
	for _, bad := range []string{
		"", " ", "a b", "a..b", ".a", "a.", "-a", "a-", "*", "*.", "*.org", "a.*.b", "*a.b.c", "10.0.0", "10.0.0.256", "1.2.3.4.5", "http://a", "a:1",
		"[::1]", "0.0.0.0", "::", "bücher.example", strings.Repeat("a", 64), strings.Repeat("a.", 127) + "a",
	} {
		_, err := a.IssueTenants([]string{"ok", bad}, time.Now(), time.Hour)
		require.Error(t, err, bad)
	}
	_, err := a.IssueTenants(nil, time.Now(), time.Hour)
	require.ErrorContains(t, err, "1 to 100 hosts")
	_, err = a.Issue(Tenants, "x", c.PublicKey, time.Now(), time.Hour)
	require.ErrorContains(t, err, "not issued by name", "and so never for clients")
}

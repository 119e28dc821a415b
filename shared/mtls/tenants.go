package mtls

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"
)

const (
	// MaxHosts is the maximum number of hosts in one certificate.
	MaxHosts = 100
	// maxHost is the maximum length of a host name, in bytes (RFC 1035 part 2.3.4). maxLabel is the maximum length of
	// one label, in bytes.
	maxHost  = 253
	maxLabel = 63
)

// IssueTenants generates a key and a certificate for the ports that serve tenants. The certificate is valid from
// now-backdate to now+lifetime. Its hosts are IP addresses and host names. Only the first label of a host name may be
// *. The certificate can be used only by servers, and is accepted neither as a member's nor as an agent's.
//
// The key is P-256, which every client supports. The authority signs with Ed25519, which browsers do not support: for
// browsers, use a certificate of a public authority.
func (a *Authority) IssueTenants(hosts []string, now time.Time, lifetime time.Duration) (*tls.Certificate, error) {
	template := &x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	if len(hosts) == 0 || len(hosts) > MaxHosts {
		return nil, fmt.Errorf("a certificate names 1 to %d hosts, got %d", MaxHosts, len(hosts))
	}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			if ip.IsUnspecified() {
				return nil, fmt.Errorf("%s is not an address that a client can connect to", host)
			}
			template.IPAddresses = append(template.IPAddresses, ip)
			continue
		}
		if err := checkHost(host); err != nil {
			return nil, err
		}
		template.DNSNames = append(template.DNSNames, host)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	leaf, err := a.sign(ID{a.cluster, Tenants, "ports"}, template, key.Public(), now, lifetime)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: key, Leaf: leaf}, nil
}

// checkHost returns an error if host is not a valid host name. The first label may be * if there are at least three
// labels (RFC 6125 part 6.4.3).
func checkHost(host string) error {
	bad := fmt.Errorf("%q is neither a host name nor an IP address", host)
	if len(host) > maxHost {
		return bad
	}
	labels := strings.Split(strings.TrimPrefix(host, "*."), ".")
	digits := strings.Trim(labels[len(labels)-1], "0123456789") == ""
	if digits || slices.ContainsFunc(labels, func(l string) bool { return !isLabel(l) }) {
		return bad
	}
	if strings.HasPrefix(host, "*.") && len(labels) < 2 {
		return errors.New("* must be the first label, followed by at least two others")
	}
	return nil
}

func isLabel(l string) bool {
	if l == "" || len(l) > maxLabel || l[0] == '-' || l[len(l)-1] == '-' {
		return false
	}
	return !strings.ContainsFunc(l, func(r rune) bool {
		return r != '-' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
	})
}

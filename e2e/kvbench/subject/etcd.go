package subject

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// Ports of the etcd servers: the standard port for clients, and for peers one that no Trivet member uses.
const (
	etcdClients = 2379
	etcdPeers   = 2390
)

// Etcd returns three etcd servers that run the program etcd in the directory bin, with their files beneath dir. Their
// settings are etcd's defaults, except for the quota and mutual TLS between the servers. It starts no server.
func Etcd(dir, bin string) (*Trio, error) {
	bin, err := filepath.Abs(bin)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	at := lab.Dir(dir)
	if err := writeCertificates(dir, time.Now()); err != nil {
		return nil, err
	}
	name := func(id int) string { return fmt.Sprintf("etcd-%d", id) }
	for id := 1; id <= Members; id++ {
		if err := os.MkdirAll(at.Path(name(id)), 0o700); err != nil {
			return nil, err
		}
	}
	run := func(id int) error {
		return at.Start(lab.Program{Name: name(id), Binary: filepath.Join(bin, "etcd"), Args: etcdFlags(name, id), Work: dir})
	}
	return &Trio{dir: at, port: etcdClients, name: name, run: run}, nil
}

func etcdFlags(name func(int) string, id int) []string {
	peer := func(id int) string { return fmt.Sprintf("https://%s:%d", host(id), etcdPeers) }
	var cluster []string
	for id := 1; id <= Members; id++ {
		cluster = append(cluster, name(id)+"="+peer(id))
	}
	clients := fmt.Sprintf("http://%s:%d", host(id), etcdClients)
	return []string{
		"--name", name(id), "--data-dir", name(id), "--quota-backend-bytes", fmt.Sprint(quota),
		"--listen-client-urls", clients, "--advertise-client-urls", clients,
		"--listen-peer-urls", peer(id), "--initial-advertise-peer-urls", peer(id),
		"--initial-cluster", strings.Join(cluster, ","), "--initial-cluster-state", "new", "--initial-cluster-token", "kvbench",
		"--peer-client-cert-auth", "--peer-trusted-ca-file", "ca.pem", "--peer-cert-file", "peer.pem", "--peer-key-file", "peer-key.pem",
	}
}

// writeCertificates creates a certificate authority and one certificate, for the addresses of all three servers, and
// writes them with the certificate's key to dir. They are valid for a day.
func writeCertificates(dir string, now time.Time) error {
	template := x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kvbench"}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	authorityKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	authority, err := x509.CreateCertificate(rand.Reader, &template, &template, &authorityKey.PublicKey, authorityKey)
	if err != nil {
		return fmt.Errorf("make authority: %w", err)
	}
	leaf := x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "peer"}, NotBefore: template.NotBefore, NotAfter: template.NotAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for id := 1; id <= Members; id++ {
		leaf.IPAddresses = append(leaf.IPAddresses, net.ParseIP(host(id)))
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	certificate, err := x509.CreateCertificate(rand.Reader, &leaf, &template, &key.PublicKey, authorityKey)
	if err != nil {
		return fmt.Errorf("make certificate: %w", err)
	}
	keyBytes, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	for _, f := range []struct {
		name, kind string
		bytes      []byte
	}{{"ca.pem", "CERTIFICATE", authority}, {"peer.pem", "CERTIFICATE", certificate}, {"peer-key.pem", "PRIVATE KEY", keyBytes}} {
		if err := os.WriteFile(filepath.Join(dir, f.name), pem.EncodeToMemory(&pem.Block{Type: f.kind, Bytes: f.bytes}), 0o600); err != nil {
			return err
		}
	}
	return nil
}

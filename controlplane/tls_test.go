package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

func TestPlaintextIsLogged(t *testing.T) {
	for says, change := range map[string]func(*config.Config){
		"level=WARN": func(*config.Config) {},
		"level=INFO": func(c *config.Config) { c.Dev = true },
		"INSECURE: tenants' tokens and passwords": func(c *config.Config) { c.Listen = "10.0.0.1" },
		"INSECURE: the ports for etcd's":          func(c *config.Config) { c.TLS, c.KV.EtcdListen = config.TLS{Cert: "c", Key: "k"}, []string{":1"} },
		"":                                        func(c *config.Config) { c.Listen, c.TLS = "10.0.0.1", config.TLS{Cert: "c", Key: "k"} },
	} {
		var text bytes.Buffer
		c := config.Default()
		change(&c)
		warnAboutPlaintext(c, slog.New(slog.NewTextHandler(&text, nil)))
		require.Contains(t, text.String(), says)
		require.Equal(t, says == "", text.Len() == 0, says)
		require.LessOrEqual(t, bytes.Count(text.Bytes(), []byte("\n")), 1, "there must be at most one warning")
	}
}

func TestURLsFollowTLS(t *testing.T) {
	c := config.Default()
	require.Equal(t, "http://127.0.0.1:50051", firstMembers(c)[0].ClientURLs[0])
	c.TLS = config.TLS{Cert: "c", Key: "k"}
	require.Equal(t, "https://127.0.0.1:50051", firstMembers(c)[0].ClientURLs[0])
}

// runTenantCert runs the command tenant-cert with a new cluster key and returns the directory with its files, and the
// key.
func runTenantCert(t *testing.T, hosts string) (dir string, key *clusterkey.Key) {
	dir = t.TempDir()
	key, err := clusterkey.LoadOrMake(filepath.Join(dir, "cluster.key"))
	require.NoError(t, err)
	require.NoError(t, tenantCertArgs(dir, "--hosts", hosts))
	return dir, key
}

func tenantCertArgs(dir string, args ...string) error {
	c := command()
	c.SetArgs(append([]string{"tenant-cert", "--cluster-key", filepath.Join(dir, "cluster.key"), "--dir", dir}, args...))
	c.SetOut(io.Discard)
	return c.Execute()
}

func tenantCAPool(t *testing.T, dir string) *x509.CertPool {
	text, err := os.ReadFile(filepath.Join(dir, "tls-ca.crt"))
	require.NoError(t, err)
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(text))
	return pool
}

// serveTenantTLS serves the ports for the key-value REST API and for gRPC over TLS, with a new tenants' certificate.
// keys and rpcs are their addresses.
func serveTenantTLS(t *testing.T) (keys, rpcs string, dir string, authority *mtls.Authority) {
	dir, key := runTenantCert(t, "127.0.0.1")
	authority, err := key.Authority()
	require.NoError(t, err)
	c := config.Default()
	c.TLS = config.TLS{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key")}
	tenants, err := openTLS(c, testCertificate(authority, 1), authority, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	free := func() string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer l.Close()
		return l.Addr().String()
	}
	keys, rpcs = free(), free()
	e := &listenerSet{log: slog.New(slog.DiscardHandler), failed: make(chan error, 4)}
	t.Cleanup(func() { e.close(0) })
	protocolHandler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, member := mtls.PeerID(*r.TLS)
		if member {
			io.WriteString(w, id.String())
		} else {
			io.WriteString(w, r.Proto)
		}
	})
	require.NoError(t, e.serve("kv", keys, nil, protocolHandler, tenants.kvREST))
	public, _ := rpc.New(rpc.Options{Credentials: tenants.grpc(), Log: e.log, Metrics: grpcprom.NewServerMetrics(), Public: true})
	require.NoError(t, e.serve("grpc", rpcs, public.Server, nil, nil))
	return keys, rpcs, dir, authority
}

// TestForwardsRequireAMemberCertificate checks that members forward requests with mutual TLS and the cluster's
// certificates, on the same port that serves tenants with the tenants' certificate. No other certificate may be
// accepted for forwarding.
func TestForwardsRequireAMemberCertificate(t *testing.T) {
	keys, _, dir, authority := serveTenantTLS(t)
	get := func(config *tls.Config) (string, error) {
		client := &http.Client{Transport: &http.Transport{TLSClientConfig: config}}
		defer client.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+keys, nil)
		require.NoError(t, err)
		resp, err := client.Do(r)
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		return string(text), err
	}
	body, err := get(&tls.Config{RootCAs: tenantCAPool(t, dir), NextProtos: []string{"h2", "http/1.1"}})
	require.NoError(t, err)
	require.Equal(t, "HTTP/1.1", body)
	_, err = get(&tls.Config{})
	var unknown x509.UnknownAuthorityError
	require.ErrorAs(t, err, &unknown)

	forwards := func(own mtls.Source, a *mtls.Authority) *tls.Config {
		config := mtls.Client(own, a.Certificate(), mtls.OnlyKind(mtls.Member))
		config.NextProtos = []string{forwardProtocol, "http/1.1"}
		return config
	}
	body, err = get(forwards(testCertificate(authority, 2), authority))
	require.NoError(t, err)
	require.Equal(t, "spiffe://"+authority.Cluster()+"/member/2", body)

	node, err := authority.IssueFor(mtls.Node, "n", time.Now(), time.Hour)
	require.NoError(t, err)
	other, err := mtls.NewAuthority(authority.Cluster(), bytes.Repeat([]byte{7}, 32))
	require.NoError(t, err)
	for name, config := range map[string]*tls.Config{
		"no client certificate":              forwards(nil, authority),
		"a host's certificate":               forwards(func() (*tls.Certificate, error) { return node, nil }, authority),
		"a member certificate of another CA": forwards(testCertificate(other, 2), authority),
		"a client that trusts another CA":    forwards(testCertificate(authority, 2), other),
	} {
		_, err := get(config)
		require.Error(t, err, name)
	}
	// A member that forwards a request must not accept the tenants' certificate as that of another member.
	lost := forwards(testCertificate(authority, 2), authority)
	lost.NextProtos = []string{"http/1.1"}
	_, err = get(lost)
	require.ErrorContains(t, err, "want a member")
}

func TestGRPCNegotiatesHTTP2(t *testing.T) {
	_, rpcs, dir, _ := serveTenantTLS(t)
	for offers, works := range map[string]bool{"h2": true, "spdy/3": false} {
		conn, err := tls.Dial("tcp", rpcs, &tls.Config{RootCAs: tenantCAPool(t, dir), NextProtos: []string{offers}})
		require.Equal(t, works, err == nil, "%s: %v", offers, err)
		if err == nil {
			require.Equal(t, "h2", conn.ConnectionState().NegotiatedProtocol)
			require.Equal(t, uint16(tls.VersionTLS13), conn.ConnectionState().Version)
			conn.Close()
		}
	}
}

func TestUnreadableTLSFiles(t *testing.T) {
	dir, key := runTenantCert(t, "localhost")
	authority, err := key.Authority()
	require.NoError(t, err)
	c := config.Default()
	c.TLS = config.TLS{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key")}
	require.NoError(t, os.Chmod(c.TLS.Key, 0o644))
	_, err = openTLS(c, testCertificate(authority, 1), authority, slog.New(slog.DiscardHandler))
	require.ErrorContains(t, err, "chmod 600")
	c.TLS = config.TLS{}
	tenants, err := openTLS(c, testCertificate(authority, 1), authority, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	require.Nil(t, tenants.rest)
	require.Nil(t, tenants.grpc())
}

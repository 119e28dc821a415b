package dial

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// TestSecretsNeedLoopbackOrTLS checks that Open with a secret and without TLS returns an *Exposed error, except for
// loopback addresses and localhost.
func TestSecretsNeedLoopbackOrTLS(t *testing.T) {
	for endpoint, here := range map[string]bool{
		"127.0.0.1:1": true, "127.3.2.1:1": true, "[::1]:1": true, "localhost:1": true, "[::ffff:127.0.0.1]:1": true,
		"10.0.0.1:1": false, "0.0.0.0:1": false, "[::]:1": false, "localhost.example.org:1": false, "host:1": false, "127.0.0.1.example.org:1": false,
		"[fe80::1%lo]:1": false, "127.1:1": false,
	} {
		for name, o := range map[string]Options{"token": {Token: "t"}, "password": {Confides: true}} {
			o.Endpoints = []string{"127.0.0.1:9", endpoint}
			_, err := Open(o)
			var exposed *Exposed
			require.Equal(t, !here, err != nil, "%s to %s: %v", name, endpoint, err)
			if !here {
				require.ErrorAs(t, err, &exposed)
				require.Equal(t, endpoint, exposed.Endpoint)
			}
			for _, change := range []func(*Options){
				func(o *Options) { o.Plaintext = true }, func(o *Options) { o.TLS = &tls.Config{} },
				func(o *Options) { o.Token, o.Confides = "", false },
			} {
				o := o
				change(&o)
				_, err := Open(o)
				require.NoError(t, err)
			}
		}
	}
}

// TestHandshakes checks that the error of a failed TLS handshake contains what is wrong with the server's certificate.
func TestHandshakes(t *testing.T) {
	authority := func(seed byte) (*mtls.Authority, *x509.CertPool) {
		a, err := mtls.NewAuthority("c", bytes.Repeat([]byte{seed}, 32))
		require.NoError(t, err)
		pool := x509.NewCertPool()
		pool.AddCert(a.Certificate())
		return a, pool
	}
	ours, trust := authority(1)
	_, others := authority(2)
	serving := func(at time.Time, host string) string {
		c, err := ours.IssueTenants([]string{host}, at, time.Hour)
		require.NoError(t, err)
		return listening(t, grpc.Creds(credentials.NewServerTLSFromCert(c)))
	}
	good := serving(time.Now(), "127.0.0.1")
	for name, c := range map[string]struct {
		endpoint string
		trust    *x509.CertPool
		says     string
	}{
		"good":                            {good, trust, ""},
		"unknown authority":               {good, others, "give the authority with --tls-ca"},
		"certificate for another address": {serving(time.Now(), "127.0.0.2"), trust, "valid for 127.0.0.2, not 127.0.0.1"},
		"expired":                         {serving(time.Now().Add(-2*time.Hour), "127.0.0.1"), trust, "expired"},
		"plaintext":                       {listening(t), trust, "does not speak TLS"},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := Open(Options{Endpoints: []string{c.endpoint}, TLS: &tls.Config{RootCAs: c.trust}, Token: "t"})
			require.NoError(t, err)
			defer conn.Close()
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			_, err = vmv1.NewVmServiceClient(conn).GetVm(ctx, &vmv1.GetVmRequest{})
			if c.says == "" {
				require.Equal(t, codes.Unimplemented, status.Code(err), "%v", err)
				return
			}
			var unreachableErr *Unreachable
			require.ErrorAs(t, err, &unreachableErr)
			require.Contains(t, unreachableErr.Tried[0].Why, c.says)
		})
	}
}

// listening starts a gRPC server without services on a port of loopback, and returns its host:port.
func listening(t *testing.T, opts ...grpc.ServerOption) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := grpc.NewServer(opts...)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return l.Addr().String()
}

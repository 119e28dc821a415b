package e2e

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	peerv1 "github.com/trivet-cloud/trivet/protos/peer/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// TestCertificatesAtPorts makes calls with each kind of certificate at each internal port. It checks that the TLS
// handshake fails for kinds that the port must not accept, and that each call succeeds only with the right kinds.
func TestCertificatesAtPorts(t *testing.T) {
	w := newWorld(t)
	ctx := w.context(2 * time.Minute)
	key, err := clusterkey.Load(w.trio.KeyFile())
	require.NoError(t, err)
	ours, err := key.Authority()
	require.NoError(t, err)
	theirs, err := clusterkey.Generate().Authority()
	require.NoError(t, err)
	impostor, err := mtls.NewAuthority(ours.Cluster(), make([]byte, 32))
	require.NoError(t, err)
	now := time.Now()
	issue := func(a *mtls.Authority, kind mtls.Kind, name string, at time.Time) mtls.Source {
		c, err := a.IssueFor(kind, name, at, time.Hour)
		require.NoError(t, err)
		return func() (*tls.Certificate, error) { return c, nil }
	}
	ports, err := ours.IssueTenants([]string{"127.0.0.1"}, now, time.Hour)
	require.NoError(t, err)
	shown := map[string]mtls.Source{
		"no certificate":                        nil,
		"member 2":                              issue(ours, mtls.Member, "2", now),
		"a member that is not listed":           issue(ours, mtls.Member, "9", now),
		"a host without a record":               issue(ours, mtls.Node, "01a1f876-dea8-7a03-959f-ee9f62360c4e", now),
		"an expired member":                     issue(ours, mtls.Member, "2", now.Add(-3*time.Hour)),
		"an expired host":                       issue(ours, mtls.Node, "n", now.Add(-3*time.Hour)),
		"the certificate of the tenants' ports": func() (*tls.Certificate, error) { return ports, nil },
		"a member of another cluster":           issue(theirs, mtls.Member, "2", now),
		"a member of another authority":         issue(impostor, mtls.Member, "2", now),
		"a host of another cluster":             issue(theirs, mtls.Node, "n", now),
	}
	dial := func(port string, own mtls.Source) *grpc.ClientConn {
		config := mtls.Client(own, ours.Certificate(), mtls.OnlyKind(mtls.Member))
		conn, err := grpc.NewClient("passthrough:///127.0.0.1:"+port, grpc.WithTransportCredentials(credentials.NewTLS(config)))
		require.NoError(t, err)
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	_, own, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, own)
	require.NoError(t, err)
	calls := []struct {
		name, port string
		call       func(context.Context, *grpc.ClientConn) error
		// gets maps the certificates with which the handshake must succeed, by their name in shown, to the status that
		// the call must have. With all others, the handshake must fail.
		gets map[string]codes.Code
	}{
		{"a command of the leader", "2380", func(ctx context.Context, c *grpc.ClientConn) error {
			_, err := peerv1.NewPeerServiceClient(c).Call(ctx, &peerv1.CallRequest{Command: "none"})
			return err
		}, map[string]codes.Code{"member 2": codes.OK, "a member that is not listed": codes.PermissionDenied}},
		{"a heartbeat", "7443", func(ctx context.Context, c *grpc.ClientConn) error {
			_, err := vmv1.NewNodeServiceClient(c).HeartbeatNode(ctx, &vmv1.HeartbeatNodeRequest{})
			return err
		}, map[string]codes.Code{"no certificate": codes.Unauthenticated, "a host without a record": codes.PermissionDenied, "an expired host": codes.Unauthenticated}},
		{"an image", "7443", func(ctx context.Context, c *grpc.ClientConn) error {
			s, err := agentv1.NewAgentServiceClient(c).ReadImage(ctx, &agentv1.ReadImageRequest{})
			if err == nil {
				_, err = s.Recv()
			}
			return err
		}, map[string]codes.Code{"no certificate": codes.Unauthenticated, "a host without a record": codes.PermissionDenied, "an expired host": codes.Unauthenticated}},
		{"a join", "7443", func(ctx context.Context, c *grpc.ClientConn) error {
			_, err := agentv1.NewAgentServiceClient(c).Join(ctx, &agentv1.JoinRequest{Protocol: 1, Token: "a.b.c", Name: "x", Csr: csr})
			return err
		}, map[string]codes.Code{"no certificate": codes.Unauthenticated, "a host without a record": codes.Unauthenticated, "an expired host": codes.Unauthenticated}},
		{"the list of nodes", "7443", func(ctx context.Context, c *grpc.ClientConn) error {
			_, err := vmv1.NewNodeServiceClient(c).ListNodes(ctx, &vmv1.ListNodesRequest{})
			return err
		}, map[string]codes.Code{"no certificate": codes.Unauthenticated, "a host without a record": codes.Unimplemented, "an expired host": codes.Unimplemented}},
	}
	for _, c := range calls {
		for name, own := range shown {
			err := c.call(ctx, dial(c.port, own))
			want, letIn := c.gets[name]
			if !letIn {
				want = codes.Unavailable // gRPC's status for a failed handshake
			}
			require.Equal(t, want, status.Code(err), "%s by %s: %v", c.name, name, err)
		}
	}
	// Neither port must accept a connection without TLS.
	for _, port := range []string{"2380", "7443"} {
		conn, err := grpc.NewClient("passthrough:///127.0.0.1:"+port, grpc.WithTransportCredentials(insecure.NewCredentials()))
		require.NoError(t, err)
		_, err = peerv1.NewPeerServiceClient(conn).Call(ctx, &peerv1.CallRequest{})
		require.Equal(t, codes.Unavailable, status.Code(err), "%s: %v", port, err)
		require.NoError(t, conn.Close())
	}
}

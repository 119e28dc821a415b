package etcdrpc_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// tokens is a verifier of two tokens.
type tokens struct{}

func (tokens) Verify(_ context.Context, token string) (*cloud.Caller, error) {
	c := &cloud.Caller{Proof: cloud.ProofPassword}
	switch token {
	case "operator":
		c.Bindings = []cloud.Binding{{Role: cloud.SystemAdmin}}
	case "tenant":
		c.Bindings = []cloud.Binding{{Role: cloud.ProjectAdmin, Org: "o", Project: "p"}}
	default:
		return nil, fault.New(fault.Unauthenticated, "no")
	}
	return c, nil
}

// enter asks whether a call is let in.
func enter(s *etcdrpc.Server, method, from string, header ...string) error {
	ctx := peer.NewContext(context.Background(), &peer.Peer{Addr: &net.TCPAddr{IP: net.ParseIP(from), Port: 1}})
	ctx = metadata.NewIncomingContext(ctx, metadata.Pairs(header...))
	_, err := s.Unary(ctx, &pb.StatusRequest{}, &grpc.UnaryServerInfo{FullMethod: method},
		func(context.Context, any) (any, error) { return nil, nil })
	return err
}

func TestWhoMayComeIn(t *testing.T) {
	const near, far = "127.0.0.1", "192.0.2.1"
	data := []string{pb.KV_Range_FullMethodName, pb.KV_Put_FullMethodName, pb.Lease_LeaseGrant_FullMethodName, pb.Auth_Authenticate_FullMethodName}
	admin := []string{pb.Cluster_MemberList_FullMethodName, pb.Maintenance_Status_FullMethodName, pb.Auth_UserAdd_FullMethodName, pb.Maintenance_Alarm_FullMethodName}
	own := []string{pb.Auth_UserGet_FullMethodName, pb.Auth_AuthStatus_FullMethodName}
	denied := rpctypes.ErrGRPCPermissionDenied
	for name, c := range map[string]struct {
		open             bool
		from             string
		header           []string
		data, own, admin error
	}{
		"loopback":                   {false, near, nil, nil, nil, nil},
		"elsewhere":                  {false, far, nil, denied, denied, denied},
		"elsewhere, open":            {true, far, nil, nil, denied, denied},
		"operator":                   {false, far, []string{"authorization", "Bearer operator"}, nil, nil, nil},
		"tenant":                     {false, far, []string{"authorization", "Bearer tenant"}, denied, denied, denied},
		"nobody":                     {false, far, []string{"authorization", "Bearer x"}, rpctypes.ErrGRPCInvalidAuthToken, rpctypes.ErrGRPCInvalidAuthToken, rpctypes.ErrGRPCInvalidAuthToken},
		"a token of Auth, not asked": {false, far, []string{"token", "kv1.x"}, denied, denied, denied},
	} {
		w := newWorld(t)
		s := etcdrpc.New(etcdrpc.Options{Service: w.service, Verifier: tokens{}, Open: c.open})
		for _, class := range []struct {
			methods []string
			want    error
		}{{data, c.data}, {own, c.own}, {admin, c.admin}} {
			for _, method := range class.methods {
				require.Equal(t, class.want, enter(s, method, c.from, c.header...), "%s: %s", name, method)
			}
		}
	}
}

// enableAuth makes root, and a user who may read and write below /u/.
func enableAuth(t *testing.T, c *clientv3.Client) {
	ctx := t.Context()
	for _, f := range []func() error{
		func() error { _, err := c.UserAdd(ctx, "root", "secret"); return err },
		func() error { _, err := c.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := c.UserAdd(ctx, "u", "word"); return err },
		func() error { _, err := c.RoleAdd(ctx, "r"); return err },
		func() error {
			_, err := c.RoleGrantPermission(ctx, "r", "/u/", clientv3.GetPrefixRangeEnd("/u/"), clientv3.PermissionType(clientv3.PermReadWrite))
			return err
		},
		func() error { _, err := c.UserGrantRole(ctx, "u", "r"); return err },
		func() error { _, err := c.AuthEnable(ctx); return err },
	} {
		require.NoError(t, f())
	}
}

func TestOnceAuthIsEnabledItsRulesHold(t *testing.T) {
	const near, far = "127.0.0.1", "192.0.2.1"
	w := newWorld(t)
	enableAuth(t, w.client(t))
	s := etcdrpc.New(etcdrpc.Options{Service: w.service, Verifier: tokens{}})
	root, user := w.token(t, "root", "secret"), w.token(t, "u", "word")
	// From afar keys are Auth's affair now, and administration that of its root.
	require.NoError(t, enter(s, pb.KV_Range_FullMethodName, far))
	require.NoError(t, enter(s, pb.Auth_UserGet_FullMethodName, far))
	require.Equal(t, rpctypes.ErrGRPCPermissionDenied, enter(s, pb.Cluster_MemberList_FullMethodName, far))
	require.Equal(t, rpctypes.ErrGRPCPermissionDenied, enter(s, pb.Cluster_MemberList_FullMethodName, far, "token", user))
	require.NoError(t, enter(s, pb.Cluster_MemberList_FullMethodName, far, "token", root))
	require.NoError(t, enter(s, pb.Cluster_MemberList_FullMethodName, far, "authorization", root))
	require.NoError(t, enter(s, pb.Cluster_MemberList_FullMethodName, far, "authorization", "Bearer operator"))
	require.NoError(t, enter(s, pb.Cluster_MemberList_FullMethodName, near))

	ctx := t.Context()
	nobody := w.client(t)
	_, err := nobody.Get(ctx, "a")
	require.Equal(t, rpctypes.ErrUserEmpty, err)
	_, err = nobody.AuthDisable(ctx)
	require.Equal(t, rpctypes.ErrUserEmpty, err)
	c := w.client(t, func(c *clientv3.Config) { c.Username, c.Password = "u", "word" })
	_, err = c.Put(ctx, "/u/a", "1")
	require.NoError(t, err)
	_, err = c.Put(ctx, "/other", "1")
	require.Equal(t, rpctypes.ErrPermissionDenied, err)
	_, err = c.Get(ctx, "", clientv3.WithPrefix())
	require.Equal(t, rpctypes.ErrPermissionDenied, err)
	_, err = c.Txn(ctx).If(clientv3.Compare(clientv3.Version("/other"), "=", 0)).Then(clientv3.OpGet("/u/a")).Commit()
	require.Equal(t, rpctypes.ErrPermissionDenied, err)
	watching, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	refused := <-c.Watch(watching, "/other")
	require.ErrorContains(t, refused.Err(), "permission denied")
	seen := c.Watch(watching, "/u/a", clientv3.WithRev(2))
	require.Equal(t, "1", string((<-seen).Events[0].Kv.Value))
	_, err = c.UserList(ctx)
	require.Equal(t, rpctypes.ErrPermissionDenied, err)
	_, err = c.UserGet(ctx, "u")
	require.NoError(t, err)
	_, err = clientv3.New(clientv3.Config{Endpoints: []string{w.address}, Username: "u", Password: "wrong", DialTimeout: 10 * time.Second})
	require.Equal(t, rpctypes.ErrAuthFailed, err)

	// An operator of the cloud is not locked out.
	operated := metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer operator")
	other := newWorldLike(t, w)
	_, err = other.AuthDisable(operated)
	require.NoError(t, err)
	_, err = nobody.Get(ctx, "a")
	require.NoError(t, err)
	_, err = c.Get(ctx, "/other")
	require.NoError(t, err, "tokens do no harm")
}

// newWorldLike is a second port of the same service, which knows the cloud's tokens.
func newWorldLike(t *testing.T, w *world) *clientv3.Client {
	s := etcdrpc.New(etcdrpc.Options{Service: w.service, Verifier: tokens{}, Dir: t.TempDir()})
	g := grpc.NewServer(grpc.UnaryInterceptor(s.Unary), grpc.StreamInterceptor(s.Stream))
	s.Register(g)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	go func() { defer close(done); g.Serve(l) }()
	t.Cleanup(func() { g.Stop(); <-done })
	return (&world{address: l.Addr().String()}).client(t)
}

// issue makes a certificate, of itself when there is no parent.
func issue(t *testing.T, name string, parent *tls.Certificate) *tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	c := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, IsCA: parent == nil, BasicConstraintsValid: true,
	}
	signer, signed := any(key), c
	if parent != nil {
		signer, signed = parent.PrivateKey, parent.Leaf
	}
	der, err := x509.CreateCertificate(rand.Reader, c, signed, key.Public(), signer)
	require.NoError(t, err)
	leaf, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

// With TLS the common name of a client's certificate is the user of whoever shows no token, and a certificate opens what
// loopback does.
func TestClientsWithCertificates(t *testing.T) {
	ctx := t.Context()
	ca := issue(t, "ca", nil)
	pool := x509.NewCertPool()
	pool.AddCert(ca.Leaf)
	w := newWorld(t, func(s *settings) {
		s.tls = &tls.Config{Certificates: []tls.Certificate{*issue(t, "server", ca)}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool}
		s.rpc.CommonName = true
	})
	as := func(name string) *clientv3.Client {
		return w.client(t, func(c *clientv3.Config) {
			c.TLS = &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{*issue(t, name, ca)}}
		})
	}
	enableAuth(t, as("anybody"))
	u := as("u")
	_, err := u.Put(ctx, "/u/a", "1")
	require.NoError(t, err)
	_, err = u.Put(ctx, "/b", "1")
	require.Equal(t, rpctypes.ErrPermissionDenied, err)
	_, err = as("root").Put(ctx, "/b", "1")
	require.NoError(t, err)
	_, err = as("stranger").Get(ctx, "/b")
	require.Equal(t, rpctypes.ErrPermissionDenied, err)

	// HTTP on the same port, with a certificate and without.
	web := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{*issue(t, "m", ca)}}}}
	r, err := web.Get("https://" + w.address + "/health")
	require.NoError(t, err)
	r.Body.Close()
	require.Equal(t, 200, r.StatusCode)
	web.CloseIdleConnections()
	bare := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	_, err = bare.Get("https://" + w.address + "/health")
	require.Error(t, err)
}

// A connection that says nothing, or nonsense, is closed, and others are served meanwhile.
func TestStrangeConnections(t *testing.T) {
	w := newWorld(t)
	for _, text := range []string{"", "PRI", "PRI * HTTP/1.7\r\n\r\n", strings.Repeat("\x00", 100)} {
		conn, err := net.Dial("tcp", w.address)
		require.NoError(t, err)
		_, err = conn.Write([]byte(text))
		require.NoError(t, err)
		defer conn.Close()
	}
	_, err := w.client(t).Put(t.Context(), "a", "1")
	require.NoError(t, err)
}

// fading is a verifier whose administrator is none after the first call.
type fading struct{ asked atomic.Int64 }

func (f *fading) Verify(_ context.Context, token string) (*cloud.Caller, error) {
	c := &cloud.Caller{Proof: cloud.ProofPassword, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}}
	if f.asked.Add(1) > 1 {
		if token == "demoted" {
			c.Bindings = nil
			return c, nil
		}
		return nil, fault.New(fault.Unauthenticated, "no longer")
	}
	return c, nil
}

// opened is a stream that somebody far away has opened.
type opened struct {
	grpc.ServerStream
	ctx context.Context
}

func (o opened) Context() context.Context { return o.ctx }

// A stream that the administrator's token opened ends with the token, and with the role.
func TestAStreamEndsWithTheAdministratorsToken(t *testing.T) {
	w := newWorld(t)
	for _, token := range []string{"revoked", "demoted"} {
		t.Run(token, func(t *testing.T) {
			s := etcdrpc.New(etcdrpc.Options{Service: w.service, Verifier: &fading{}})
			ctx := peer.NewContext(t.Context(), &peer.Peer{Addr: &net.TCPAddr{IP: net.ParseIP("192.0.2.1"), Port: 1}})
			ctx = metadata.NewIncomingContext(ctx, metadata.Pairs("authorization", "Bearer "+token))
			err := s.Stream(nil, opened{ctx: ctx}, &grpc.StreamServerInfo{FullMethod: pb.Watch_Watch_FullMethodName}, func(_ any, ss grpc.ServerStream) error {
				select {
				case <-ss.Context().Done():
					return context.Cause(ss.Context())
				case <-time.After(30 * time.Second):
					return errors.New("it goes on")
				}
			})
			require.Equal(t, codes.Unauthenticated, status.Code(err), "%v", err)
		})
	}
}

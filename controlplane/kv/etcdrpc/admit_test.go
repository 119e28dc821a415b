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
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
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

// testVerifier accepts the tokens of an operator, who has the role system:admin, and of a tenant, who does not.
type testVerifier struct{}

func (testVerifier) Verify(_ context.Context, token string) (*cloud.Caller, error) {
	c := &cloud.Caller{Proof: cloud.ProofPassword}
	switch token {
	case "operator", "a.jwt.operator":
		c.Bindings = []cloud.Binding{{Role: cloud.SystemAdmin}}
	case "tenant":
		c.Bindings = []cloud.Binding{{Role: cloud.ProjectAdmin, Org: "o", Project: "p"}}
	default:
		return nil, fault.New(fault.Unauthenticated, "no")
	}
	return c, nil
}

// loopbackIP is a loopback address, and remoteIP is an address of another network.
const loopbackIP, remoteIP = "127.0.0.1", "192.0.2.1"

// call makes a unary call over a connection whose two ends both have the IP address from, and returns its error.
func call(s *etcdrpc.Server, method, from string, header ...string) error {
	return callBetween(s, method, from, from, header...)
}

// callBetween is like call, but the local and the remote address may differ.
func callBetween(s *etcdrpc.Server, method, local, remote string, header ...string) error {
	ctx := peer.NewContext(context.Background(), &peer.Peer{
		LocalAddr: &net.TCPAddr{IP: net.ParseIP(local), Port: 50051}, Addr: &net.TCPAddr{IP: net.ParseIP(remote), Port: 1},
	})
	ctx = metadata.NewIncomingContext(ctx, metadata.Pairs(header...))
	_, err := s.Unary(ctx, &pb.StatusRequest{}, &grpc.UnaryServerInfo{FullMethod: method},
		func(context.Context, any) (any, error) { return nil, nil })
	return err
}

// The methods of each class. Governing methods, which change the cluster or the authorization, need a credential on
// loopback too.
var (
	dataMethods      = []string{pb.KV_Range_FullMethodName, pb.KV_Put_FullMethodName, pb.Lease_LeaseGrant_FullMethodName, pb.Auth_Authenticate_FullMethodName}
	selfQueryMethods = []string{pb.Auth_UserGet_FullMethodName, pb.Auth_AuthStatus_FullMethodName, pb.Auth_RoleGet_FullMethodName}
	adminMethods     = []string{
		pb.Cluster_MemberList_FullMethodName, pb.Maintenance_Status_FullMethodName, pb.Maintenance_Alarm_FullMethodName,
		pb.Maintenance_Defragment_FullMethodName, pb.Maintenance_Hash_FullMethodName, pb.Maintenance_HashKV_FullMethodName,
		pb.Auth_UserList_FullMethodName, pb.Auth_RoleList_FullMethodName,
	}
	governingMethods = []string{
		pb.Cluster_MemberAdd_FullMethodName, pb.Cluster_MemberRemove_FullMethodName, pb.Cluster_MemberUpdate_FullMethodName,
		pb.Cluster_MemberPromote_FullMethodName, pb.Maintenance_MoveLeader_FullMethodName, pb.Maintenance_Downgrade_FullMethodName, pb.Maintenance_Snapshot_FullMethodName,
		pb.Auth_AuthEnable_FullMethodName, pb.Auth_AuthDisable_FullMethodName, pb.Auth_UserAdd_FullMethodName, pb.Auth_UserDelete_FullMethodName,
		pb.Auth_UserChangePassword_FullMethodName, pb.Auth_UserGrantRole_FullMethodName, pb.Auth_UserRevokeRole_FullMethodName,
		pb.Auth_RoleAdd_FullMethodName, pb.Auth_RoleDelete_FullMethodName, pb.Auth_RoleGrantPermission_FullMethodName,
		pb.Auth_RoleRevokePermission_FullMethodName, etcdrpc.Prefix + "Cluster/OfALaterEtcd",
	}
)

func TestAdmission(t *testing.T) {
	denied, invalid := rpctypes.ErrGRPCPermissionDenied, rpctypes.ErrGRPCInvalidAuthToken
	for name, c := range map[string]struct {
		open, trust                 bool
		local, remote               string
		header                      []string
		data, own, admin, governing error
	}{
		"loopback":                                     {false, false, loopbackIP, loopbackIP, nil, nil, nil, nil, denied},
		"loopback, trusted":                            {false, true, loopbackIP, loopbackIP, nil, nil, nil, nil, nil},
		"loopback, operator":                           {false, false, loopbackIP, loopbackIP, []string{"authorization", "Bearer operator"}, nil, nil, nil, nil},
		"loopback, operator by etcdctl":                {false, false, loopbackIP, loopbackIP, []string{"token", "a.jwt.operator"}, nil, nil, nil, nil},
		"loopback, tenant":                             {false, false, loopbackIP, loopbackIP, []string{"authorization", "Bearer tenant"}, nil, nil, nil, denied},
		"loopback, invalid token":                      {false, false, loopbackIP, loopbackIP, []string{"authorization", "Bearer x"}, nil, nil, nil, invalid},
		"from loopback to another address":             {false, true, remoteIP, loopbackIP, nil, denied, denied, denied, denied},
		"from the loopback network address":            {false, true, remoteIP, "127.0.0.0", nil, denied, denied, denied, denied},
		"from another address to loopback":             {false, true, loopbackIP, remoteIP, nil, denied, denied, denied, denied},
		"remote":                                       {false, true, remoteIP, remoteIP, nil, denied, denied, denied, denied},
		"remote, open store":                           {true, true, remoteIP, remoteIP, nil, nil, denied, denied, denied},
		"remote, operator":                             {false, false, remoteIP, remoteIP, []string{"authorization", "Bearer operator"}, nil, nil, nil, nil},
		"remote, operator by etcdctl":                  {false, false, remoteIP, remoteIP, []string{"token", "a.jwt.operator"}, nil, nil, nil, nil},
		"remote, tenant":                               {false, false, remoteIP, remoteIP, []string{"authorization", "Bearer tenant"}, denied, denied, denied, denied},
		"remote, invalid token":                        {false, false, remoteIP, remoteIP, []string{"authorization", "Bearer x"}, invalid, invalid, invalid, invalid},
		"remote, token of Auth while Auth is disabled": {false, false, remoteIP, remoteIP, []string{"token", "kv1.x"}, denied, denied, denied, denied},
	} {
		w := newWorld(t)
		s := etcdrpc.New(etcdrpc.Options{Service: w.service, Verifier: testVerifier{}, Open: c.open, TrustLoopback: c.trust})
		for _, class := range []struct {
			methods []string
			want    error
		}{{dataMethods, c.data}, {selfQueryMethods, c.own}, {adminMethods, c.admin}, {governingMethods, c.governing}} {
			for _, method := range class.methods {
				require.Equal(t, class.want, callBetween(s, method, c.local, c.remote, c.header...), "%s: %s", name, method)
			}
		}
	}
}

// enableAuth adds the user root, and the user u, who may read and write keys with the prefix /u/, and enables Auth.
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

func TestAdmissionWithAuthEnabled(t *testing.T) {
	w := newWorld(t)
	enableAuth(t, w.client(t))
	s := etcdrpc.New(etcdrpc.Options{Service: w.service, Verifier: testVerifier{}})
	root, user := w.token(t, "root", "secret"), w.token(t, "u", "word")
	// For remote callers, Auth's rules apply to keys now. Administration needs the role root.
	require.NoError(t, call(s, pb.KV_Range_FullMethodName, remoteIP))
	require.NoError(t, call(s, pb.Auth_UserGet_FullMethodName, remoteIP))
	require.Equal(t, rpctypes.ErrGRPCPermissionDenied, call(s, pb.Cluster_MemberList_FullMethodName, remoteIP))
	require.Equal(t, rpctypes.ErrGRPCPermissionDenied, call(s, pb.Cluster_MemberList_FullMethodName, remoteIP, "token", user))
	require.NoError(t, call(s, pb.Cluster_MemberList_FullMethodName, remoteIP, "token", root))
	require.NoError(t, call(s, pb.Cluster_MemberList_FullMethodName, remoteIP, "authorization", root))
	require.NoError(t, call(s, pb.Cluster_MemberList_FullMethodName, remoteIP, "authorization", "Bearer operator"))
	require.NoError(t, call(s, pb.Cluster_MemberList_FullMethodName, loopbackIP))
	for _, method := range governingMethods {
		require.Equal(t, rpctypes.ErrGRPCUserEmpty, call(s, method, loopbackIP), method)
		require.Equal(t, rpctypes.ErrGRPCPermissionDenied, call(s, method, remoteIP), method)
		require.Equal(t, rpctypes.ErrGRPCPermissionDenied, call(s, method, loopbackIP, "token", user), method)
		require.NoError(t, call(s, method, loopbackIP, "token", root), method)
		require.NoError(t, call(s, method, remoteIP, "token", root), method)
		require.NoError(t, call(s, method, remoteIP, "authorization", "Bearer operator"), method)
	}

	ctx := t.Context()
	anonymous := w.client(t)
	_, err := anonymous.Get(ctx, "a")
	require.Equal(t, rpctypes.ErrUserEmpty, err)
	_, err = anonymous.AuthDisable(ctx)
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

	// An operator of the cloud can still disable Auth.
	operatorCtx := metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer operator")
	other := secondServer(t, w)
	_, err = other.AuthDisable(operatorCtx)
	require.NoError(t, err)
	_, err = anonymous.Get(ctx, "a")
	require.NoError(t, err)
	_, err = c.Get(ctx, "/other")
	require.NoError(t, err, "a token is accepted while Auth is disabled")
}

// secondServer serves the service of w on a second port, which also accepts cloud tokens, and returns a client for it.
func secondServer(t *testing.T, w *world) *clientv3.Client {
	s := etcdrpc.New(etcdrpc.Options{Service: w.service, Verifier: testVerifier{}, Dir: t.TempDir()})
	g := grpc.NewServer(grpc.UnaryInterceptor(s.Unary), grpc.StreamInterceptor(s.Stream))
	s.Register(g)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	go func() { defer close(done); g.Serve(l) }()
	t.Cleanup(func() { g.Stop(); <-done })
	return (&world{address: l.Addr().String()}).client(t)
}

// newCertificate creates a certificate that parent signed, or a self-signed CA if parent is nil.
func newCertificate(t *testing.T, name string, parent *tls.Certificate) *tls.Certificate {
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

// TestClientCertificates checks that the common name of a client's certificate is the user of calls without a token,
// and that a certificate counts as a credential.
func TestClientCertificates(t *testing.T) {
	ctx := t.Context()
	ca := newCertificate(t, "ca", nil)
	pool := x509.NewCertPool()
	pool.AddCert(ca.Leaf)
	w := newWorld(t, func(s *settings) {
		s.tls = &tls.Config{Certificates: []tls.Certificate{*newCertificate(t, "server", ca)}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool}
		s.rpc.CommonName = true
	})
	as := func(name string) *clientv3.Client {
		return w.client(t, func(c *clientv3.Config) {
			c.TLS = &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{*newCertificate(t, name, ca)}}
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

	// The HTTP/1 paths on the same port also require a client certificate.
	web := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{*newCertificate(t, "m", ca)}}}}
	r, err := web.Get("https://" + w.address + "/health")
	require.NoError(t, err)
	r.Body.Close()
	require.Equal(t, 200, r.StatusCode)
	web.CloseIdleConnections()
	noCertificate := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	_, err = noCertificate.Get("https://" + w.address + "/health")
	require.Error(t, err)
}

// TestConnectionsOfUnknownProtocolAreClosed checks that the server closes a connection that sends neither HTTP/1 nor
// HTTP/2, and serves other clients while such connections are open. TestSplitterClosesSilentConnections tests
// connections that send too little to detect a protocol.
func TestConnectionsOfUnknownProtocolAreClosed(t *testing.T) {
	w := newWorld(t)
	dial := func(text string) net.Conn {
		conn, err := net.Dial("tcp", w.address)
		require.NoError(t, err)
		t.Cleanup(func() { conn.Close() })
		_, err = conn.Write([]byte(text))
		require.NoError(t, err)
		return conn
	}
	dial("")
	dial("PRI")
	invalid := []net.Conn{dial("PRI * HTTP/1.7\r\n\r\nSM\r\n\r\n"), dial(strings.Repeat("\x00", 100) + "\r\n\r\n")}
	_, err := w.client(t).Put(t.Context(), "a", "1")
	require.NoError(t, err)
	for _, conn := range invalid {
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(30*time.Second)))
		_, err := io.Copy(io.Discard, conn)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the connection is still open")
	}
}

// expiringVerifier is a verifier that accepts the token of an administrator only in the first call. From then on the
// token is revoked or, for the token "demoted", its holder has lost system:admin. staysOpen is set if the test expects
// that the stream stays open.
type expiringVerifier struct {
	calls     atomic.Int64
	staysOpen bool
}

func (f *expiringVerifier) Verify(ctx context.Context, token string) (*cloud.Caller, error) {
	if token == "tenant" {
		return testVerifier{}.Verify(ctx, token)
	}
	c := &cloud.Caller{Proof: cloud.ProofPassword, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}}
	if f.calls.Add(1) > 1 {
		if token == "demoted" {
			c.Bindings = nil
			return c, nil
		}
		return nil, fault.New(fault.Unauthenticated, "no longer")
	}
	return c, nil
}

// streamWithContext is a server stream with a context.
type streamWithContext struct {
	grpc.ServerStream
	ctx context.Context
}

func (o streamWithContext) Context() context.Context { return o.ctx }

// stream opens a watch stream from an address and returns the error that ended it. With staysOpen it returns errStillOpen
// if the stream is still open after two checks of a token.
func (f *expiringVerifier) stream(t *testing.T, w *world, open bool, from, token string) error {
	s := etcdrpc.New(etcdrpc.Options{Service: w.service, Verifier: f, Open: open})
	at := &net.TCPAddr{IP: net.ParseIP(from), Port: 1}
	ctx := peer.NewContext(t.Context(), &peer.Peer{Addr: at, LocalAddr: at})
	ctx = metadata.NewIncomingContext(ctx, metadata.Pairs("authorization", "Bearer "+token))
	return s.Stream(nil, streamWithContext{ctx: ctx}, &grpc.StreamServerInfo{FullMethod: pb.Watch_Watch_FullMethodName}, func(_ any, ss grpc.ServerStream) error {
		if f.staysOpen {
			// Two streams that begin later, one after the other, end when their tokens are checked. By then the token of
			// this stream would have been checked, too.
			for range 2 {
				if err := (&expiringVerifier{}).stream(t, w, false, remoteIP, "revoked"); status.Code(err) != codes.Unauthenticated {
					return err
				}
			}
			if ss.Context().Err() == nil {
				return errStillOpen
			}
		}
		select {
		case <-ss.Context().Done():
			return context.Cause(ss.Context())
		case <-time.After(30 * time.Second):
			return errors.New("the stream of the revoked token is still open")
		}
	})
}

var errStillOpen = status.Error(codes.OK+100, "the stream is still open")

// TestStreamEndsWhenTokenIsRevoked checks that a stream that was admitted only by an administrator's token ends when
// the token is revoked, and when its holder loses the role.
func TestStreamEndsWhenTokenIsRevoked(t *testing.T) {
	w := newWorld(t)
	for _, token := range []string{"revoked", "demoted"} {
		t.Run(token, func(t *testing.T) {
			t.Parallel()
			err := (&expiringVerifier{}).stream(t, w, false, remoteIP, token)
			require.Equal(t, codes.Unauthenticated, status.Code(err), "%v", err)
		})
	}
}

// TestStreamAdmittedWithoutTokenContinues checks that a stream that would have been admitted without a token continues
// when the token that the client sent becomes invalid.
func TestStreamAdmittedWithoutTokenContinues(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		open        bool
		from, token string
	}{
		"loopback, no longer administrator":   {false, loopbackIP, "demoted"},
		"loopback, revoked token":             {false, loopbackIP, "revoked"},
		"open store, tenant":                  {true, remoteIP, "tenant"},
		"open store, no longer administrator": {true, remoteIP, "demoted"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, errStillOpen, (&expiringVerifier{staysOpen: true}).stream(t, w, c.open, c.from, c.token))
		})
	}
}

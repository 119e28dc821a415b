package etcdrpc_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
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
	case "operator", "a.jwt.operator":
		c.Bindings = []cloud.Binding{{Role: cloud.SystemAdmin}}
	case "tenant":
		c.Bindings = []cloud.Binding{{Role: cloud.ProjectAdmin, Org: "o", Project: "p"}}
	default:
		return nil, fault.New(fault.Unauthenticated, "no")
	}
	return c, nil
}

// near and far are addresses on loopback and of another network.
const near, far = "127.0.0.1", "192.0.2.1"

// enter makes a call over a connection whose two addresses are both from, and returns its error.
func enter(s *etcdrpc.Server, method, from string, header ...string) error {
	return over(s, method, from, from, header...)
}

// over is enter with both addresses of the connection.
func over(s *etcdrpc.Server, method, local, remote string, header ...string) error {
	ctx := peer.NewContext(context.Background(), &peer.Peer{
		LocalAddr: &net.TCPAddr{IP: net.ParseIP(local), Port: 50051}, Addr: &net.TCPAddr{IP: net.ParseIP(remote), Port: 1},
	})
	ctx = metadata.NewIncomingContext(ctx, metadata.Pairs(header...))
	_, err := s.Unary(ctx, &pb.StatusRequest{}, &grpc.UnaryServerInfo{FullMethod: method},
		func(context.Context, any) (any, error) { return nil, nil })
	return err
}

// Methods by who may call them. Those that change the cluster, or who has access, take a credential on loopback too.
var (
	dataMethods  = []string{pb.KV_Range_FullMethodName, pb.KV_Put_FullMethodName, pb.Lease_LeaseGrant_FullMethodName, pb.Auth_Authenticate_FullMethodName}
	ownMethods   = []string{pb.Auth_UserGet_FullMethodName, pb.Auth_AuthStatus_FullMethodName, pb.Auth_RoleGet_FullMethodName}
	adminMethods = []string{
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

func TestWhoMayComeIn(t *testing.T) {
	denied, invalid := rpctypes.ErrGRPCPermissionDenied, rpctypes.ErrGRPCInvalidAuthToken
	for name, c := range map[string]struct {
		open, trust                 bool
		local, remote               string
		header                      []string
		data, own, admin, governing error
	}{
		"loopback":                               {false, false, near, near, nil, nil, nil, nil, denied},
		"loopback, trusted":                      {false, true, near, near, nil, nil, nil, nil, nil},
		"loopback, operator":                     {false, false, near, near, []string{"authorization", "Bearer operator"}, nil, nil, nil, nil},
		"loopback, by etcdctl":                   {false, false, near, near, []string{"token", "a.jwt.operator"}, nil, nil, nil, nil},
		"loopback, tenant":                       {false, false, near, near, []string{"authorization", "Bearer tenant"}, nil, nil, nil, denied},
		"loopback, invalid token":                {false, false, near, near, []string{"authorization", "Bearer x"}, nil, nil, nil, invalid},
		"source bound to loopback":               {false, true, far, near, nil, denied, denied, denied, denied},
		"the loopback network":                   {false, true, far, "127.0.0.0", nil, denied, denied, denied, denied},
		"to loopback from elsewhere":             {false, true, near, far, nil, denied, denied, denied, denied},
		"elsewhere":                              {false, true, far, far, nil, denied, denied, denied, denied},
		"elsewhere, open":                        {true, true, far, far, nil, nil, denied, denied, denied},
		"operator":                               {false, false, far, far, []string{"authorization", "Bearer operator"}, nil, nil, nil, nil},
		"operator, by etcdctl":                   {false, false, far, far, []string{"token", "a.jwt.operator"}, nil, nil, nil, nil},
		"tenant":                                 {false, false, far, far, []string{"authorization", "Bearer tenant"}, denied, denied, denied, denied},
		"invalid token":                          {false, false, far, far, []string{"authorization", "Bearer x"}, invalid, invalid, invalid, invalid},
		"a token of Auth while Auth is disabled": {false, false, far, far, []string{"token", "kv1.x"}, denied, denied, denied, denied},
	} {
		w := newWorld(t)
		s := etcdrpc.New(etcdrpc.Options{Service: w.service, Verifier: tokens{}, Open: c.open, TrustLoopback: c.trust})
		for _, class := range []struct {
			methods []string
			want    error
		}{{dataMethods, c.data}, {ownMethods, c.own}, {adminMethods, c.admin}, {governingMethods, c.governing}} {
			for _, method := range class.methods {
				require.Equal(t, class.want, over(s, method, c.local, c.remote, c.header...), "%s: %s", name, method)
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
	for _, method := range governingMethods {
		require.Equal(t, rpctypes.ErrGRPCUserEmpty, enter(s, method, near), method)
		require.Equal(t, rpctypes.ErrGRPCPermissionDenied, enter(s, method, far), method)
		require.Equal(t, rpctypes.ErrGRPCPermissionDenied, enter(s, method, near, "token", user), method)
		require.NoError(t, enter(s, method, near, "token", root), method)
		require.NoError(t, enter(s, method, far, "token", root), method)
		require.NoError(t, enter(s, method, far, "authorization", "Bearer operator"), method)
	}

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

// fading is a verifier whose caller loses system:admin after the first call. stays is set if the stream must go on
// nevertheless.
type fading struct {
	asked atomic.Int64
	stays bool
}

func (f *fading) Verify(ctx context.Context, token string) (*cloud.Caller, error) {
	if token == "tenant" {
		return tokens{}.Verify(ctx, token)
	}
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

// opened is a server stream with a context.
type opened struct {
	grpc.ServerStream
	ctx context.Context
}

func (o opened) Context() context.Context { return o.ctx }

// stream opens a watch from an address and returns what ended it, errGoesOn when nothing did for a while.
func (f *fading) stream(t *testing.T, w *world, open bool, from, token string) error {
	s := etcdrpc.New(etcdrpc.Options{Service: w.service, Verifier: f, Open: open})
	at := &net.TCPAddr{IP: net.ParseIP(from), Port: 1}
	ctx := peer.NewContext(t.Context(), &peer.Peer{Addr: at, LocalAddr: at})
	ctx = metadata.NewIncomingContext(ctx, metadata.Pairs("authorization", "Bearer "+token))
	return s.Stream(nil, opened{ctx: ctx}, &grpc.StreamServerInfo{FullMethod: pb.Watch_Watch_FullMethodName}, func(_ any, ss grpc.ServerStream) error {
		wait := 30 * time.Second
		if f.stays {
			wait = 2500 * time.Millisecond // more than two checks of a token
		}
		select {
		case <-ss.Context().Done():
			return context.Cause(ss.Context())
		case <-time.After(wait):
			return errGoesOn
		}
	})
}

var errGoesOn = status.Error(codes.OK+100, "it goes on")

// A stream that the administrator's token opened ends with the token, and with the role.
func TestAStreamEndsWithTheAdministratorsToken(t *testing.T) {
	w := newWorld(t)
	for _, token := range []string{"revoked", "demoted"} {
		t.Run(token, func(t *testing.T) {
			t.Parallel()
			err := (&fading{}).stream(t, w, false, far, token)
			require.Equal(t, codes.Unauthenticated, status.Code(err), "%v", err)
		})
	}
}

// A stream that is admitted without a token goes on when the token that the client shows with it becomes invalid.
func TestAStreamThatNeededNoTokenGoesOn(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		open        bool
		from, token string
	}{
		"a tenant on loopback":               {false, near, "demoted"},
		"an old token on loopback":           {false, near, "revoked"},
		"a tenant of an open store":          {true, far, "tenant"},
		"an administrator who lost the role": {true, far, "demoted"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, errGoesOn, (&fading{stays: true}).stream(t, w, c.open, c.from, c.token))
		})
	}
}

package node

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

func (w *world) token(name string, ttl time.Duration) string {
	token, _, err := w.members[1].NewToken(w.t.Context(), name, ttl)
	require.NoError(w.t, err)
	return token
}

// TestJoin joins a host through a follower, checks its certificate and record, and opens a session with it. Join
// repeated with the same key must return the same ID; with another key it must be refused.
func TestJoin(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	token, key := w.token("", 0), newKey(t)
	pinned := w.dial(2, mtls.ClientPinned(token[strings.LastIndex(token, ".")+1:]))
	ask := &agentv1.JoinRequest{Protocol: Protocol, Token: token + "\n", Csr: request(t, key), Name: "rack-1"}
	c, err := pinned.Join(ctx, ask)
	require.NoError(t, err)
	require.Equal(t, []string{w.addresses[1], w.addresses[2]}, c.GetMembers())
	require.Equal(t, w.authority.Certificate().Raw, c.GetAuthority())
	leaf, err := x509.ParseCertificate(c.GetCertificate())
	require.NoError(t, err)
	require.NoError(t, leaf.CheckSignatureFrom(w.authority.Certificate()))
	id, err := mtls.IDOf(leaf)
	require.NoError(t, err)
	require.Equal(t, mtls.ID{Cluster: "test", Kind: mtls.Node, Name: c.GetNodeId()}, id)
	require.Equal(t, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, leaf.ExtKeyUsage, "a host's certificate must be valid for clients only")
	require.WithinDuration(t, time.Now().Add(CertificateLife), leaf.NotAfter, time.Minute)
	n := w.node(cloud.NodeID(c.GetNodeId()))
	require.Equal(t, "rack-1", n.Name)
	require.Equal(t, cloud.NodeNotReady, n.Declared, "the host must be NOT_READY before its first heartbeat")

	again, err := pinned.Join(ctx, ask)
	require.NoError(t, err)
	require.Equal(t, c.GetNodeId(), again.GetNodeId(), "a repeated join must return the same node ID")
	_, err = pinned.Join(ctx, &agentv1.JoinRequest{Protocol: Protocol, Token: token, Csr: request(t, newKey(t)), Name: "rack-1"})
	refused(t, err, codes.Unauthenticated, "used by another host")

	own := w.with(1, func() (*tls.Certificate, error) {
		return &tls.Certificate{Certificate: [][]byte{c.GetCertificate()}, PrivateKey: key, Leaf: leaf}, nil
	})
	s, err := own.Watch(ctx, &agentv1.WatchRequest{Protocol: Protocol})
	require.NoError(t, err)
	first, err := s.Recv()
	require.NoError(t, err)
	require.True(t, first.GetComplete())

	w.update(func(tx *store.Tx) error { Nodes.Delete(tx, c.GetNodeId()); return nil })
	_, err = pinned.Join(ctx, ask)
	refused(t, err, codes.Unauthenticated, "make a new one")
}

// TestJoinRefused makes joins with invalid arguments. Each must be refused, change no record and leave its token
// usable.
func TestJoinRefused(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	token := w.token("", 0)
	parts := strings.Split(token, ".")
	named := w.token("rack-9", 0)
	late := w.token("", time.Minute)
	weak, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	good := request(t, newKey(t))
	forged := slices.Clone(good)
	forged[len(forged)-1]++
	pinned := w.dial(1, mtls.ClientPinned(parts[2]))
	type ask = agentv1.JoinRequest
	for name, c := range map[string]struct {
		ask  *ask
		code codes.Code
		says string
	}{
		"a token with a wrong secret":          {&ask{Protocol: 1, Token: parts[0] + ".AAAA." + parts[2], Csr: good, Name: "h"}, codes.Unauthenticated, "unknown, expired or used"},
		"a token without a secret":             {&ask{Protocol: 1, Token: parts[0] + ".." + parts[2], Csr: good, Name: "h"}, codes.Unauthenticated, "unknown, expired or used"},
		"a token with an unknown ID":           {&ask{Protocol: 1, Token: "0011." + parts[1] + "." + parts[2], Csr: good, Name: "h"}, codes.Unauthenticated, "unknown, expired or used"},
		"a token ID that contains a path":      {&ask{Protocol: 1, Token: "../" + parts[0] + "." + parts[1] + "." + parts[2], Csr: good, Name: "h"}, codes.Unauthenticated, "unknown, expired or used"},
		"no token":                             {&ask{Protocol: 1, Csr: good, Name: "h"}, codes.Unauthenticated, "unknown, expired or used"},
		"a long token":                         {&ask{Protocol: 1, Token: strings.Repeat("x", 600) + ".y.z", Csr: good, Name: "h"}, codes.Unauthenticated, "unknown, expired or used"},
		"a token for a host with another name": {&ask{Protocol: 1, Token: named, Csr: good, Name: "rack-8"}, codes.PermissionDenied, "for the host rack-9"},
		"no name":                              {&ask{Protocol: 1, Token: token, Csr: good}, codes.InvalidArgument, "name"},
		"a name with a line break":             {&ask{Protocol: 1, Token: token, Csr: good, Name: "a\nb"}, codes.InvalidArgument, "name"},
		"a long name":                          {&ask{Protocol: 1, Token: token, Csr: good, Name: strings.Repeat("n", 254)}, codes.InvalidArgument, "name"},
		"another protocol":                     {&ask{Protocol: 2, Token: token, Csr: good, Name: "h"}, codes.FailedPrecondition, "upgrade the older"},
		"no certificate request":               {&ask{Protocol: 1, Token: token, Name: "h"}, codes.InvalidArgument, "csr"},
		"garbage":                              {&ask{Protocol: 1, Token: token, Csr: []byte("garbage"), Name: "h"}, codes.InvalidArgument, "csr"},
		"a forged certificate request":         {&ask{Protocol: 1, Token: token, Csr: forged, Name: "h"}, codes.InvalidArgument, "not signed by its own key"},
		"a too large certificate request":      {&ask{Protocol: 1, Token: token, Csr: make([]byte, mtls.MaxRequest+1), Name: "h"}, codes.InvalidArgument, "at most"},
		"an RSA key":                           {&ask{Protocol: 1, Token: token, Csr: request(t, weak), Name: "h"}, codes.InvalidArgument, "Ed25519 or ECDSA"},
	} {
		_, err := pinned.Join(ctx, c.ask)
		require.Error(t, err, name)
		refused(t, err, c.code, c.says)
	}
	w.pass(2 * time.Minute)
	_, err = pinned.Join(ctx, &ask{Protocol: 1, Token: late, Csr: good, Name: "h"})
	refused(t, err, codes.Unauthenticated, "expired")
	require.NoError(t, w.records.Local(func(v *store.View) error {
		all, _, err := Nodes.List(v, 0)
		require.Empty(t, all)
		return err
	}))

	// The refused calls must not have used up the tokens.
	_, err = pinned.Join(ctx, &ask{Protocol: 1, Token: named, Csr: good, Name: "rack-9"})
	require.NoError(t, err)
	curve, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	_, err = pinned.Join(ctx, &ask{Protocol: 1, Token: token, Csr: request(t, curve), Name: "h"})
	require.NoError(t, err)

	_, err = w.dial(1, mtls.ClientPinned(strings.Repeat("0", 64))).Join(ctx, &ask{Protocol: 1, Token: token, Csr: good, Name: "h"})
	refused(t, err, codes.Unavailable, "another certificate authority")
}

// TestConcurrentJoinsWithOneToken has twenty hosts join at two members with one token at the same time. Exactly one of
// them must succeed.
func TestConcurrentJoinsWithOneToken(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	token := w.token("", 0)
	pin := token[strings.LastIndex(token, ".")+1:]
	var joined atomic.Int64
	var hosts sync.WaitGroup
	for n := range 20 {
		agent, csr := w.dial(uint64(1+n%2), mtls.ClientPinned(pin)), request(t, newKey(t))
		hosts.Go(func() {
			_, err := agent.Join(ctx, &agentv1.JoinRequest{Protocol: Protocol, Token: token, Csr: csr, Name: fmt.Sprint("rack-", n)})
			if err == nil {
				joined.Add(1)
			} else if status.Code(err) != codes.Unauthenticated {
				t.Errorf("host %d: %v", n, err)
			}
		})
	}
	hosts.Wait()
	require.EqualValues(t, 1, joined.Load())
	require.NoError(t, w.records.Local(func(v *store.View) error {
		all, _, err := Nodes.List(v, 0)
		require.Len(t, all, 1)
		return err
	}))
}

// TestTokens checks the lifetimes that join tokens can have, and that Expire deletes expired tokens.
func TestTokens(t *testing.T) {
	w := newWorld(t)
	s := w.members[2]
	for ttl, want := range map[time.Duration]time.Duration{0: time.Hour, time.Minute: time.Minute, 30 * 24 * time.Hour: 30 * 24 * time.Hour} {
		token, expires, err := s.NewToken(t.Context(), "", ttl)
		require.NoError(t, err)
		require.Len(t, strings.Split(token, "."), 3)
		require.WithinDuration(t, time.Now().Add(want), time.UnixMilli(expires), time.Minute)
	}
	for _, ttl := range []time.Duration{-1, 31 * 24 * time.Hour} {
		_, _, err := s.NewToken(t.Context(), "", ttl)
		require.True(t, fault.Is(err, fault.InvalidArgument))
	}
	_, _, err := s.NewToken(t.Context(), strings.Repeat("n", 254), 0)
	require.True(t, fault.Is(err, fault.InvalidArgument))
	left := func() (n int) {
		require.NoError(t, w.records.Local(func(v *store.View) error {
			all, _, err := joinTokens.List(v, 0)
			n = len(all)
			return err
		}))
		return n
	}
	w.pass(2 * time.Minute)
	require.NoError(t, s.Expire(t.Context()))
	require.Equal(t, 2, left())
	// Expire must also delete expired tokens if there are many valid ones.
	w.update(func(tx *store.Tx) error {
		for n := range 1500 {
			expires := tx.Now() + 1
			if n < 1100 {
				expires += time.Hour.Milliseconds()
			}
			joinTokens.Put(tx, &joinToken{Expires: expires}, string(testVM(n)))
		}
		return nil
	})
	w.pass(time.Minute)
	require.NoError(t, s.Expire(t.Context()))
	require.Equal(t, 1102, left())
}

// TestRenew checks that a host can renew its certificate while it is valid and for RenewGrace after it has expired.
// With an expired certificate every other call must be refused.
func TestRenew(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	id, key := w.host(1, 1).id, newKey(t)
	csr := request(t, key)
	issued := func(ago, life time.Duration) agent {
		return w.with(2, w.certificateFor(id, key, time.Now().Add(-ago), life))
	}
	for name, a := range map[string]agent{
		"valid": issued(0, time.Hour), "just expired": issued(time.Hour+time.Minute, time.Hour), "expired for six days": issued(7*24*time.Hour, 24*time.Hour),
	} {
		_, err := a.Renew(ctx, &agentv1.RenewRequest{Csr: request(t, newKey(t))})
		refused(t, err, codes.InvalidArgument, "the key of the connection")
		c, err := a.Renew(ctx, &agentv1.RenewRequest{Csr: csr})
		require.NoError(t, err, name)
		require.Equal(t, string(id), c.GetNodeId())
		leaf, err := x509.ParseCertificate(c.GetCertificate())
		require.NoError(t, err)
		require.WithinDuration(t, time.Now().Add(CertificateLife), leaf.NotAfter, time.Minute)
		_, err = a.Renew(ctx, &agentv1.RenewRequest{Csr: []byte("garbage")})
		refused(t, err, codes.InvalidArgument, "csr")
	}
	_, err := issued(9*24*time.Hour, 24*time.Hour).Renew(ctx, &agentv1.RenewRequest{Csr: csr})
	require.Equal(t, codes.Unavailable, codeOf(err), "after the grace period even the connection must be refused: %v", err)
	for method, err := range callAll(ctx, issued(time.Hour+time.Minute, time.Hour)) {
		if method != "Join" && method != "Renew" {
			require.Equal(t, codes.Unauthenticated, codeOf(err), "%s: %v", method, err)
			require.ErrorContains(t, err, "renew", method)
		}
	}
	gone := w.with(1, w.certificate(mtls.Node, string(testVM(99)), time.Now(), time.Hour))
	_, err = gone.Renew(ctx, &agentv1.RenewRequest{Csr: csr})
	refused(t, err, codes.PermissionDenied, "join again")
}

// TestRejoinKeepsNodeID checks that a host that joins again with its key keeps its ID and its record. A host with
// another key and the same name must get another ID. A second machine with the same key must be refused while the host
// is connected.
func TestRejoinKeepsNodeID(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	join := func(key any, name string) (*agentv1.Credential, error) {
		token := w.token("", 0)
		return w.dial(2, mtls.ClientPinned(token[strings.LastIndex(token, ".")+1:])).Join(ctx,
			&agentv1.JoinRequest{Protocol: Protocol, Token: token, Csr: request(t, key), Name: name})
	}
	key := newKey(t)
	first, err := join(key, "rack-1")
	require.NoError(t, err)
	before := w.node(cloud.NodeID(first.GetNodeId()))
	again, err := join(key, "rack-1")
	require.NoError(t, err)
	require.Equal(t, first.GetNodeId(), again.GetNodeId())
	require.Equal(t, before, w.node(before.ID), "a repeated join must not change the host's record")
	other, err := join(newKey(t), "rack-1")
	require.NoError(t, err)
	require.NotEqual(t, first.GetNodeId(), other.GetNodeId())

	leaf, err := x509.ParseCertificate(again.GetCertificate())
	require.NoError(t, err)
	own := w.with(1, func() (*tls.Certificate, error) {
		return &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: key, Leaf: leaf}, nil
	})
	session, stop := context.WithCancel(ctx)
	s, err := own.Watch(session, &agentv1.WatchRequest{Protocol: Protocol})
	require.NoError(t, err)
	_, err = s.Recv()
	require.NoError(t, err)
	_, err = join(key, "rack-2")
	refused(t, err, codes.Unavailable, "remove the identity that was copied")
	_, err = join(newKey(t), "rack-1")
	refused(t, err, codes.AlreadyExists, "is connected and has the name rack-1")
	stop()
	require.Eventually(t, func() bool { return !w.members[1].connected(before.ID) }, 10*time.Second, time.Millisecond)
	_, err = join(key, "rack-2")
	require.NoError(t, err)
	_, err = join(newKey(t), "rack-1")
	require.NoError(t, err, "a new machine may have the name of one that is not connected, which it replaces")

	// If the host's record was deleted, it must join under a new ID.
	w.update(func(tx *store.Tx) error { Nodes.Delete(tx, first.GetNodeId()); return nil })
	later, err := join(key, "rack-1")
	require.NoError(t, err)
	require.NotEqual(t, first.GetNodeId(), later.GetNodeId())
	again, err = join(key, "rack-1")
	require.NoError(t, err)
	require.Equal(t, later.GetNodeId(), again.GetNodeId())
}

// TestKeyIsStoredOnReport checks that the key of a host whose key is not stored is stored when the host reports facts,
// so that a later join gets the same ID.
func TestKeyIsStoredOnReport(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	a := w.host(1, 1)
	source := w.certificate(mtls.Node, string(a.id), time.Now(), time.Hour)
	cert, err := source()
	require.NoError(t, err)
	s, err := w.with(1, source).Report(ctx)
	require.NoError(t, err)
	require.NoError(t, s.Send(&agentv1.ReportRequest{Facts: &agentv1.NodeFacts{BootId: "b"}}))
	_, err = s.CloseAndRecv()
	require.NoError(t, err)
	token := w.token("", 0)
	c, err := w.dial(1, mtls.ClientPinned(token[strings.LastIndex(token, ".")+1:])).Join(ctx,
		&agentv1.JoinRequest{Protocol: Protocol, Token: token, Csr: request(t, cert.PrivateKey), Name: "host-1"})
	require.NoError(t, err)
	require.EqualValues(t, a.id, c.GetNodeId())
}

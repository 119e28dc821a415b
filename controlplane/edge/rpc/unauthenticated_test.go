package rpc

import (
	"context"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/peer"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestUnreadUnauthenticatedStreamsDoNotBlockOperators lets unauthenticated callers who do not read use up their limit
// of unsent bytes. Operators, who act in no org either, must still be able to send.
func TestUnreadUnauthenticatedStreamsDoNotBlockOperators(t *testing.T) {
	s := NewStreams()
	ctx, end := context.WithCancelCause(t.Context())
	defer end(nil)
	s.newFlow(ctx, end).hold(MaxOrgUnsent)
	unproven := auth.With(ctx, &cloud.Caller{User: "admin", Proof: cloud.ProofNone}, auth.RPC)
	s.newFlow(unproven, end).hold(1)
	admin := &cloud.Caller{User: "admin", Proof: cloud.ProofPassword, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}}
	f := s.newFlow(auth.With(ctx, admin, auth.RPC), end)
	f.bind("")
	require.Equal(t, int64(0), f.gate.used)
	require.NoError(t, f.ready(ctx))
}

// TestStreamsOfAnIPv6Network checks that all 2^64 addresses of one IPv6 network together may open as many streams as
// one IPv4 address.
func TestStreamsOfAnIPv6Network(t *testing.T) {
	s := NewStreams()
	from := func(ip string) []scope {
		return callerScopes(peer.NewContext(t.Context(), &peer.Peer{Addr: &net.TCPAddr{IP: net.ParseIP(ip), Port: 1}}), nil)
	}
	for range MaxAddressStreams {
		require.NoError(t, s.take(from("2001:db8::1")))
	}
	require.ErrorContains(t, s.take(from("2001:db8::2")), "address 2001:db8:: has 32 streams")
	require.NoError(t, s.take(from("2001:db8:0:1::1")))
}

package rpc

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// admitted returns the context of a call of WatchVm in acme/web that a server other than gRPC has authenticated.
func admitted(t *testing.T, v *tokens, token string) context.Context {
	caller, err := v.Verify(t.Context(), token)
	require.NoError(t, err)
	return auth.With(t.Context(), caller, auth.REST)
}

// TestOpenCountsStreams checks that a stream of another server counts against the same limits as gRPC streams, and no
// longer when it has ended.
func TestOpenCountsStreams(t *testing.T) {
	v, s := &tokens{}, NewStreams()
	checks := auth.NewRechecker(v)
	const token = "ada/acme/web"
	var leave []func()
	for range MaxPrincipalStreams {
		ctx, end, err := s.Open(admitted(t, v, token), checks, token)
		require.NoError(t, err)
		_, err = auth.Admit(ctx, "/vmcontroller.v1.VmService/WatchVm", "acme", "web")
		require.NoError(t, err)
		leave = append(leave, end)
	}
	_, _, err := s.Open(admitted(t, v, token), checks, token)
	require.True(t, fault.Is(err, fault.ResourceExhausted), err)
	require.Equal(t, MaxPrincipalStreams, s.open(tenantScopes(cloud.Tenant{Org: "acme", Project: "web"})[0]))
	for _, end := range leave {
		end()
	}
	require.Empty(t, s.counts)
}

// TestOpenStreamEndsWithItsToken checks that the context of a stream ends with the reason when its token becomes
// invalid, and when the holder loses the role.
func TestOpenStreamEndsWithItsToken(t *testing.T) {
	for _, c := range []struct {
		end  func(*tokens)
		want fault.Kind
	}{
		{func(v *tokens) { v.ended.Store(true) }, fault.Unauthenticated},
		{func(v *tokens) { v.moved.Store(true) }, fault.PermissionDenied},
	} {
		v, s := &tokens{}, NewStreams()
		ctx, leave, err := s.Open(admitted(t, v, "ada/acme/web"), auth.NewRechecker(v), "ada/acme/web")
		require.NoError(t, err)
		_, err = auth.Admit(ctx, "/vmcontroller.v1.VmService/WatchVm", "acme", "web")
		require.NoError(t, err)
		c.end(v)
		bound, cancel := context.WithTimeout(ctx, 10*auth.RecheckEvery)
		<-bound.Done()
		require.True(t, fault.Is(context.Cause(ctx), c.want), "%v", context.Cause(ctx))
		cancel()
		leave()
	}
}

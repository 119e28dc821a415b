package rpc

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/metadata"
)

// TestRespondAsync checks the forms of a list of preferences in RFC 7240, section 2.
func TestRespondAsync(t *testing.T) {
	require.False(t, RespondAsync(t.Context()), "a call without metadata")
	for value, want := range map[string]bool{
		"": false, "respond-async": true, "Respond-Async": true, "wait=10, respond-async": true, "respond-async; x=1, wait=10": true,
		"return=minimal": false, "respond-asynchronously": false, "x=respond-async": false,
	} {
		ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs("prefer", value))
		require.Equal(t, want, RespondAsync(ctx), "%q", value)
	}
	two := metadata.NewIncomingContext(t.Context(), metadata.Pairs("prefer", "wait=10", "prefer", "respond-async"))
	require.True(t, RespondAsync(two), "a second value of the metadata")
}

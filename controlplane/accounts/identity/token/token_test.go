package token

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestTTL checks the lifetime for valid values of ttl_seconds, and that TTL returns InvalidArgument for values above
// MaxTTL.
func TestTTL(t *testing.T) {
	for asked, want := range map[uint64]time.Duration{0: time.Hour, 1: time.Second, 3600: time.Hour, MaxTTL: 720 * time.Hour} {
		got, err := TTL(asked)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for _, asked := range []uint64{MaxTTL + 1, math.MaxInt64 / 1_000_000_000, math.MaxInt64, math.MaxUint64} {
		_, err := TTL(asked)
		require.True(t, fault.Is(err, fault.InvalidArgument), "%d: %v", asked, err)
		require.ErrorContains(t, err, "ttl_seconds")
	}
}

// TestScope checks that each "scope" claim is decoded to its tenant and encoded to the same text, and that malformed
// claims are refused.
func TestScope(t *testing.T) {
	for text, want := range map[string]cloud.Tenant{
		"system": {}, "org:acme": {Org: "acme"}, "project:acme/web": {Org: "acme", Project: "web"}, "project:/web": {Project: "web"},
	} {
		require.Equal(t, text, ScopeOf(want))
		got, ok := (&Claims{Scope: text}).Tenant()
		require.True(t, ok, text)
		require.Equal(t, want, got)
	}
	for _, text := range []string{"", "org:", "project:", "project:acme", "project:acme/", "System", "system ", "project"} {
		_, ok := (&Claims{Scope: text}).Tenant()
		require.False(t, ok, "%q", text)
	}
}

package metadata

import (
	"bytes"
	"encoding/base64"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

func TestToken(t *testing.T) {
	key, otherKey := bytes.Repeat([]byte("k"), minKey), bytes.Repeat([]byte("l"), minKey)
	c := caller{"vpc", "port"}
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	expiry := now.Add(time.Minute)
	token := issueToken(key, c, expiry)
	require.True(t, verifyToken(key, c, token, now))
	require.True(t, verifyToken(key, c, token, expiry.Add(-time.Millisecond)))
	require.False(t, verifyToken(key, c, token, expiry), "expired")
	require.False(t, verifyToken(otherKey, c, token, now), "other key")
	for _, other := range []caller{{"vpc", "port2"}, {"vpc2", "port"}, {"vpcp", "ort"}, {"vpcport", ""}, {"", "vpcport"}, {}} {
		require.False(t, verifyToken(key, other, token, now), "%+v", other)
	}
	for _, wrong := range []string{"", "x", token[:len(token)-1], token + "A", token + "=", token + "\n", " " + token,
		base64.RawURLEncoding.EncodeToString(make([]byte, 8)), base64.RawURLEncoding.EncodeToString(make([]byte, 40))} {
		require.False(t, verifyToken(key, c, wrong, now), wrong)
	}
	raw, err := base64.RawURLEncoding.DecodeString(token)
	require.NoError(t, err)
	for bit := range len(raw) * 8 {
		changed := bytes.Clone(raw)
		changed[bit/8] ^= 1 << (bit % 8)
		require.False(t, verifyToken(key, c, base64.RawURLEncoding.EncodeToString(changed), now), "bit %d", bit)
	}
}

// FuzzVerifyToken: no text is a valid token, except with negligible probability.
func FuzzVerifyToken(f *testing.F) {
	c := caller{cloud.VPCID("vpc"), cloud.PortID("port")}
	key := bytes.Repeat([]byte("k"), minKey)
	f.Add(issueToken(key, caller{"vpc", "other"}, time.Unix(1<<40, 0)))
	f.Add("")
	f.Fuzz(func(t *testing.T, token string) {
		require.False(t, verifyToken(key, c, token, time.Unix(0, 0)))
	})
}

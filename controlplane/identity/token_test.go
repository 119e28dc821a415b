package identity

import (
	"crypto/ed25519"
	"encoding/base64"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/clusterkey"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func subject(name string) jwt.Claims { return jwt.Claims{Subject: name} }

// TTLs are taken as they are or refused, never clamped.
func TestTTL(t *testing.T) {
	for asked, want := range map[uint64]time.Duration{0: time.Hour, 1: time.Second, 3600: time.Hour, MaxTTL: 720 * time.Hour} {
		got, err := checkTTL(asked)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for _, asked := range []uint64{MaxTTL + 1, math.MaxInt64 / 1_000_000_000, math.MaxInt64, math.MaxUint64} {
		_, err := checkTTL(asked)
		require.True(t, fault.Is(err, fault.InvalidArgument), "%d: %v", asked, err)
		require.ErrorContains(t, err, "ttl_seconds")
	}
}

// Clocks may be apart when a token begins. It ends when it says, to the millisecond.
func TestATokenEndsWhenItSays(t *testing.T) {
	w := newWorld(t)
	for _, text := range []string{w.token(w.first, tokenRequest{User: "ada", TTL: 10}), w.hostToken(cloud.Tenant{})} {
		c, err := w.first.read(t.Context(), text)
		require.NoError(t, err)
		left := c.Expiry.Time().Sub(w.at)
		w.wait(left - time.Millisecond)
		_, err = w.first.Verify(t.Context(), text)
		require.NoError(t, err)
		w.wait(time.Millisecond)
		_, err = w.first.Verify(t.Context(), text)
		require.True(t, fault.Is(err, fault.Unauthenticated))
		require.ErrorContains(t, err, "expired")
	}
}

// What IssueToken and the REST answer say of the end is what the token says.
func TestTheEndThatIsToldIsTheTokens(t *testing.T) {
	w := newWorld(t)
	out, _, err := w.first.token(t.Context(), tokenRequest{User: "ada", TTL: 10})
	require.NoError(t, err)
	c, err := w.first.read(t.Context(), out.text)
	require.NoError(t, err)
	require.Equal(t, c.Expiry.Time().UnixMilli(), out.expires.UnixMilli())
}

// forgery makes tokens by hand.
type forgery struct {
	alg    jose.SignatureAlgorithm
	key    any
	kid    any
	header map[jose.HeaderKey]any
	change func(*claims)
}

func (f forgery) make(t testing.TB, w *world) string {
	opts := &jose.SignerOptions{ExtraHeaders: map[jose.HeaderKey]any{}}
	if f.kid != nil {
		opts.ExtraHeaders["kid"] = f.kid
	}
	for k, v := range f.header {
		opts.ExtraHeaders[k] = v
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: f.alg, Key: f.key}, opts)
	require.NoError(t, err)
	c := claims{
		Claims: jwt.Claims{
			Issuer: w.key.Cluster(), Subject: "admin", Audience: jwt.Audience{audience}, IssuedAt: jwt.NewNumericDate(w.at),
			Expiry: jwt.NewNumericDate(w.at.Add(time.Hour)),
		},
		Kind: "user", Proof: cloud.ProofPassword, At: w.at.UnixMilli(),
	}
	if f.change != nil {
		f.change(&c)
	}
	text, err := jwt.Signed(signer).Claims(c).Serialize()
	require.NoError(t, err)
	return text
}

// Every way to make a token that is not ours, or not for us.
func TestForgedTokens(t *testing.T) {
	w := newWorld(t)
	k, err := w.first.signer(t.Context())
	require.NoError(t, err)
	_, mine, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	ours := forgery{alg: jose.EdDSA, key: k.private, kid: k.record.ID}
	_, err = w.first.Verify(t.Context(), ours.make(t, w))
	require.NoError(t, err, "the forgeries below differ from a good token by one thing each")
	with := func(change func(*claims)) forgery { f := ours; f.change = change; return f }
	host := ed25519.NewKeyFromSeed(w.key.Derive("host-token"))
	for name, f := range map[string]forgery{
		"another key under our kid":          {alg: jose.EdDSA, key: mine, kid: k.record.ID},
		"another key under the host's kid":   {alg: jose.EdDSA, key: mine, kid: hostKeyID},
		"our key under the host's kid":       {alg: jose.EdDSA, key: k.private, kid: hostKeyID},
		"the host's key under our kid":       {alg: jose.EdDSA, key: host, kid: k.record.ID},
		"no kid":                             {alg: jose.EdDSA, key: k.private},
		"an empty kid":                       {alg: jose.EdDSA, key: k.private, kid: ""},
		"an unknown kid":                     {alg: jose.EdDSA, key: mine, kid: "0000000000000000"},
		"a kid that is a path":               {alg: jose.EdDSA, key: mine, kid: "../signing-key/" + k.record.ID},
		"a kid of 4 KiB":                     {alg: jose.EdDSA, key: mine, kid: strings.Repeat("k", 4<<10)},
		"the public key as an HMAC secret":   {alg: jose.HS256, key: []byte(k.record.Public), kid: k.record.ID},
		"a key that the token itself brings": {alg: jose.EdDSA, key: mine, kid: k.record.ID, header: map[jose.HeaderKey]any{"jwk": jose.JSONWebKey{Key: mine.Public(), KeyID: k.record.ID}}},
		"a header that must be understood":   {alg: jose.EdDSA, key: k.private, kid: k.record.ID, header: map[jose.HeaderKey]any{"crit": []string{"x"}, "x": 1}},
		"another cluster's":                  with(func(c *claims) { c.Issuer = clusterkey.Generate().Cluster() }),
		"no issuer":                          with(func(c *claims) { c.Issuer = "" }),
		"another audience":                   with(func(c *claims) { c.Audience = jwt.Audience{"billing"} }),
		"no audience":                        with(func(c *claims) { c.Audience = nil }),
		"no end":                             with(func(c *claims) { c.Expiry = nil }),
		"over for a second":                  with(func(c *claims) { c.Expiry = jwt.NewNumericDate(w.at.Add(-time.Second)) }),
		"over for an hour":                   with(func(c *claims) { c.Expiry = jwt.NewNumericDate(w.at.Add(-time.Hour)) }),
		"from the far future":                with(func(c *claims) { c.IssuedAt = jwt.NewNumericDate(w.at.Add(2 * leeway)) }),
		"not good yet":                       with(func(c *claims) { c.NotBefore = jwt.NewNumericDate(w.at.Add(2 * leeway)) }),
		"nobody's":                           with(func(c *claims) { c.Subject = "" }),
		"a host's":                           with(func(c *claims) { c.Kind = "node" }),
		"a proof that only the host key gives": with(func(c *claims) {
			c.Proof = cloud.ProofHostKey
		}),
		"a user that is not there":     with(func(c *claims) { c.Subject = "nobody" }),
		"a subject that is a path":     with(func(c *claims) { c.Subject = "a/b" }),
		"of a password not yet set":    with(func(c *claims) { c.Epoch = 7 }),
		"a scope larger than a header": with(func(c *claims) { c.Project = cloud.ProjectID(strings.Repeat("p", 9<<10)) }),
	} {
		t.Run(name, func(t *testing.T) {
			caller, err := w.first.Verify(t.Context(), f.make(t, w))
			require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
			require.Nil(t, caller)
		})
	}
	good := ours.make(t, w)
	parts := strings.Split(good, ".")
	none := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none","kid":"` + k.record.ID + `"}`))
	for name, text := range map[string]string{
		"nothing": "", "dots": "..", "garbage": "garbage", "alg none": none + "." + parts[1] + ".",
		"alg none with our signature": none + "." + parts[1] + "." + parts[2],
		"no signature":                parts[0] + "." + parts[1] + ".",
		"in JSON":                     `{"payload":"` + parts[1] + `","protected":"` + parts[0] + `","signature":"` + parts[2] + `"}`,
		"twice":                       good + "." + good, "with a tail": good + "A", "of 9 KiB": strings.Repeat("a", 9<<10),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := w.first.Verify(t.Context(), text)
			require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
		})
	}
}

// Whatever the text, Verify says who it is or that it is nobody, and never that it is somebody else.
func FuzzVerify(f *testing.F) {
	w := newWorld(f)
	good := w.token(w.first, tokenRequest{User: "ada"})
	f.Add(good)
	f.Add(good[:len(good)/2])
	f.Add("a.b.c")
	f.Fuzz(func(t *testing.T, text string) {
		caller, err := w.first.Verify(t.Context(), text)
		if err != nil {
			require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
			return
		}
		require.EqualValues(t, "ada", caller.User)
		require.Equal(t, cloud.ProofNone, caller.Proof)
	})
}

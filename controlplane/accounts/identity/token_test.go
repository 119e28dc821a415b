package identity

import (
	"crypto/ed25519"
	"encoding/base64"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestTokenExpiry checks that a token is valid until 1 ms before the time in its claim "exp", and is refused as expired
// from that time on.
func TestTokenExpiry(t *testing.T) {
	w := newWorld(t)
	for _, text := range []string{w.token(w.first, tokenRequest{User: "ada", TTL: 10}), w.hostToken(cloud.Tenant{})} {
		c, err := w.first.Verify(t.Context(), text)
		require.NoError(t, err)
		left := time.UnixMilli(c.Expires).Sub(w.at)
		w.wait(left - time.Millisecond)
		_, err = w.first.Verify(t.Context(), text)
		require.NoError(t, err)
		w.wait(time.Millisecond)
		_, err = w.first.Verify(t.Context(), text)
		require.True(t, fault.Is(err, fault.Unauthenticated), "an expired token was accepted")
		require.ErrorContains(t, err, "expired")
	}
}

// TestReportedExpiryMatchesTheToken checks that the expiry reported with an issued token equals the expiry in the
// token.
func TestReportedExpiryMatchesTheToken(t *testing.T) {
	w := newWorld(t)
	out, _, err := w.first.token(t.Context(), tokenRequest{User: "ada", TTL: 10})
	require.NoError(t, err)
	c, err := w.first.Verify(t.Context(), out.text)
	require.NoError(t, err)
	require.Equal(t, c.Expires, out.expires.UnixMilli())
}

// forgery describes a handmade token: its algorithm, key, headers, and the change to claims that are valid otherwise.
type forgery struct {
	alg    jose.SignatureAlgorithm
	key    any
	kid    any
	header map[jose.HeaderKey]any
	change func(*token.Claims)
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
	c := token.Claims{
		Claims: jwt.Claims{
			Issuer: "https://cloud.example", Subject: "admin", ID: "one", Audience: jwt.Audience{token.Audience}, IssuedAt: jwt.NewNumericDate(w.at),
			Expiry: jwt.NewNumericDate(w.at.Add(time.Hour)),
		},
		Cluster: w.key.Cluster(), Kind: token.User, Scope: "system", Proof: cloud.ProofPassword, At: w.at.UnixMilli(),
	}
	if f.change != nil {
		f.change(&c)
	}
	text, err := jwt.Signed(signer).Claims(c).Serialize()
	require.NoError(t, err)
	return text
}

// TestForgedTokens checks that Verify refuses tokens that the cluster did not issue, or issued for other programs. Each
// differs from a valid token in one thing.
func TestForgedTokens(t *testing.T) {
	w := newWorld(t)
	kid, private, err := w.first.signer(t.Context())
	require.NoError(t, err)
	public := private.Public().(ed25519.PublicKey)
	_, mine, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	ours := forgery{alg: jose.EdDSA, key: private, kid: kid}
	_, err = w.first.Verify(t.Context(), ours.make(t, w))
	require.NoError(t, err, "the token from which the forgeries are made must be valid")
	with := func(change func(*token.Claims)) forgery { f := ours; f.change = change; return f }
	host := ed25519.NewKeyFromSeed(w.key.Derive("host-token"))
	elsewhere := clusterkey.Generate()
	// unproven describes an unauthenticated token that is valid except for one change.
	unproven := func(change func(*token.Claims)) forgery {
		return forgery{alg: jose.EdDSA, key: w.first.unprovenKey, kid: unprovenKeyID, change: func(c *token.Claims) {
			c.Audience, c.Subject, c.Proof = jwt.Audience{token.UnprovenAudience}, "unproven:admin", cloud.ProofNone
			change(c)
		}}
	}
	_, err = w.first.Verify(t.Context(), unproven(func(*token.Claims) {}).make(t, w))
	require.NoError(t, err, "the unauthenticated token from which forgeries are made must be valid")
	published := with(func(c *token.Claims) {
		c.Audience, c.Subject, c.Proof = jwt.Audience{token.UnprovenAudience}, "unproven:admin", cloud.ProofNone
	})
	hostUnproven := published
	hostUnproven.key, hostUnproven.kid = host, hostKeyID
	for name, f := range map[string]forgery{
		"an unauthenticated token signed with a published key":               published,
		"an unauthenticated token signed with the host key":                  hostUnproven,
		"an unauthenticated token of a former version":                       with(func(c *token.Claims) { c.Proof = cloud.ProofNone }),
		"an authenticated token signed with the key of unauthenticated ones": {alg: jose.EdDSA, key: w.first.unprovenKey, kid: unprovenKeyID},
		"a host-key token signed with the key of unauthenticated ones": {alg: jose.EdDSA, key: w.first.unprovenKey, kid: unprovenKeyID, change: func(c *token.Claims) {
			c.Proof = cloud.ProofHostKey
		}},
		"an unauthenticated token that claims proof by password":                      unproven(func(c *token.Claims) { c.Proof = cloud.ProofPassword }),
		"an unauthenticated token with an empty proof claim":                          unproven(func(c *token.Claims) { c.Proof = "" }),
		"another key under the kid of unauthenticated tokens":                         {alg: jose.EdDSA, key: mine, kid: unprovenKeyID},
		"the key of unauthenticated tokens under the signing key's kid":               {alg: jose.EdDSA, key: w.first.unprovenKey, kid: kid},
		"an unauthenticated token for the audience of authenticated ones":             unproven(func(c *token.Claims) { c.Audience = jwt.Audience{token.Audience} }),
		"an unauthenticated token for both audiences":                                 unproven(func(c *token.Claims) { c.Audience = append(c.Audience, token.Audience) }),
		"an unauthenticated token whose subject has no prefix":                        unproven(func(c *token.Claims) { c.Subject = "admin" }),
		"an unauthenticated token whose subject is only the prefix":                   unproven(func(c *token.Claims) { c.Subject = "unproven:" }),
		"an authenticated token whose subject has the prefix of unauthenticated ones": with(func(c *token.Claims) { c.Subject = "unproven:admin" }),
		"an authenticated token for the audience of unauthenticated ones":             with(func(c *token.Claims) { c.Audience = jwt.Audience{token.UnprovenAudience} }),
		"another key under the signing key's kid":                                     {alg: jose.EdDSA, key: mine, kid: kid},
		"another key under the host key's kid":                                        {alg: jose.EdDSA, key: mine, kid: hostKeyID},
		"the signing key under the host key's kid":                                    {alg: jose.EdDSA, key: private, kid: hostKeyID},
		"the host key under the signing key's kid":                                    {alg: jose.EdDSA, key: host, kid: kid},
		"no kid":                            {alg: jose.EdDSA, key: private},
		"an empty kid":                      {alg: jose.EdDSA, key: private, kid: ""},
		"an unknown kid":                    {alg: jose.EdDSA, key: mine, kid: "0000000000000000"},
		"a kid that is a path":              {alg: jose.EdDSA, key: mine, kid: "../signing-key/" + kid},
		"a kid of 4 KiB":                    {alg: jose.EdDSA, key: mine, kid: strings.Repeat("k", 4<<10)},
		"the public key as an HMAC secret":  {alg: jose.HS256, key: []byte(public), kid: kid},
		"the public key, HMAC with SHA-512": {alg: jose.HS512, key: append([]byte(public), public...), kid: kid},
		"a kid that is an array":            {alg: jose.EdDSA, key: private, kid: []string{kid}},
		"a kid that is a number":            {alg: jose.EdDSA, key: private, kid: 1},
		"URLs of keys in the token's header": {alg: jose.EdDSA, key: mine, kid: kid, header: map[jose.HeaderKey]any{
			"jku": "http://127.0.0.1:1/jwks.json", "x5u": "http://127.0.0.1:1/chain.pem",
		}},
		"a host-key token of another cluster": {alg: jose.EdDSA, key: ed25519.NewKeyFromSeed(elsewhere.Derive("host-token")), kid: hostKeyID, change: func(c *token.Claims) {
			c.Cluster, c.Proof = elsewhere.Cluster(), cloud.ProofHostKey
		}},
		"a public key in the token's header": {alg: jose.EdDSA, key: mine, kid: kid, header: map[jose.HeaderKey]any{"jwk": jose.JSONWebKey{Key: mine.Public(), KeyID: kid}}},
		"an unknown critical header":         {alg: jose.EdDSA, key: private, kid: kid, header: map[jose.HeaderKey]any{"crit": []string{"x"}, "x": 1}},
		"the ID of another cluster":          with(func(c *token.Claims) { c.Cluster = clusterkey.Generate().Cluster() }),
		"no issuer":                          with(func(c *token.Claims) { c.Issuer = "" }),
		"another audience":                   with(func(c *token.Claims) { c.Audience = jwt.Audience{"billing"} }),
		"no audience":                        with(func(c *token.Claims) { c.Audience = nil }),
		"no expiry":                          with(func(c *token.Claims) { c.Expiry = nil }),
		"expired a second ago":               with(func(c *token.Claims) { c.Expiry = jwt.NewNumericDate(w.at.Add(-time.Second)) }),
		"expired an hour ago":                with(func(c *token.Claims) { c.Expiry = jwt.NewNumericDate(w.at.Add(-time.Hour)) }),
		"no cluster ID":                      with(func(c *token.Claims) { c.Cluster = "" }),
		"no token ID":                        with(func(c *token.Claims) { c.ID = "" }),
		"no time of issue":                   with(func(c *token.Claims) { c.IssuedAt = nil }),
		"no scope":                           with(func(c *token.Claims) { c.Scope = "" }),
		"a malformed scope":                  with(func(c *token.Claims) { c.Scope = "everything" }),
		"the kind of a service account with the ID of a user": with(func(c *token.Claims) { c.Kind = token.ServiceAccount }),
		"issued in the future":                                with(func(c *token.Claims) { c.IssuedAt = jwt.NewNumericDate(w.at.Add(2 * token.Leeway)) }),
		"not valid yet":                                       with(func(c *token.Claims) { c.NotBefore = jwt.NewNumericDate(w.at.Add(2 * token.Leeway)) }),
		"no subject":                                          with(func(c *token.Claims) { c.Subject = "" }),
		"the kind of a host":                                  with(func(c *token.Claims) { c.Kind = "node" }),
		"proof by host key, but signed with the signing key": with(func(c *token.Claims) {
			c.Proof = cloud.ProofHostKey
		}),
		"a user that does not exist":     with(func(c *token.Claims) { c.Subject = "nobody" }),
		"a subject that is a path":       with(func(c *token.Claims) { c.Subject = "a/b" }),
		"an epoch later than the user's": with(func(c *token.Claims) { c.Epoch = 7 }),
		"a scope of 900 KiB":             with(func(c *token.Claims) { c.Scope = "project:o/" + strings.Repeat("p", 900<<10) }),
		"a scope of 9 KiB":               with(func(c *token.Claims) { c.Scope = "project:o/" + strings.Repeat("p", 9<<10) }),
	} {
		t.Run(name, func(t *testing.T) {
			caller, err := w.first.Verify(t.Context(), f.make(t, w))
			require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
			require.Nil(t, caller)
		})
	}
	good := ours.make(t, w)
	parts := strings.Split(good, ".")
	encode := base64.RawURLEncoding.EncodeToString
	none := encode([]byte(`{"alg":"none","kid":"` + kid + `"}`))
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	require.NoError(t, err)
	edited := strings.Replace(string(payload), `"jti":"one"`, `"jti":"two"`, 1)
	require.NotEqual(t, string(payload), edited)
	signature, err := base64.RawURLEncoding.DecodeString(parts[2])
	require.NoError(t, err)
	// This header says that the payload is not encoded in base64 (RFC 7797).
	unencoded := encode([]byte(`{"alg":"EdDSA","b64":false,"crit":["b64"],"kid":"` + kid + `"}`))
	general := func(signatures int) string {
		one := `{"protected":"` + parts[0] + `","signature":"` + parts[2] + `"}`
		return `{"payload":"` + parts[1] + `","signatures":[` + strings.Repeat(one+",", signatures-1) + one + `]}`
	}
	for name, text := range map[string]string{
		"empty text": "", "only dots": "..", "garbage": "garbage", "alg none": none + "." + parts[1] + ".",
		"alg none with the signature of a valid token": none + "." + parts[1] + "." + parts[2],
		"no signature":                     parts[0] + "." + parts[1] + ".",
		"another payload":                  parts[0] + "." + encode([]byte(edited)) + "." + parts[2],
		"a signature plus the group order": parts[0] + "." + parts[1] + "." + encode(plusOrder(signature)),
		"a payload that is not encoded": unencoded + "." + string(payload) + "." +
			encode(ed25519.Sign(private, []byte(unencoded+"."+string(payload)))),
		"in JSON, flattened":          `{"payload":"` + parts[1] + `","protected":"` + parts[0] + `","signature":"` + parts[2] + `"}`,
		"in JSON with one signature":  general(1),
		"in JSON with two signatures": general(2),
		"five parts":                  good + "." + parts[0] + "." + parts[1],
		"two tokens in one":           good + "." + good, "an extra character at the end": good + "A",
		"9 KiB of one letter": strings.Repeat("a", 9<<10),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := w.first.Verify(t.Context(), text)
			require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
		})
	}
}

// plusOrder adds the order L of edwards25519 (RFC 8032) to the scalar of a signature. The sum satisfies the equation of
// the signature; a verifier that accepts it has not checked that the scalar is less than L.
func plusOrder(signature []byte) []byte {
	order, ok := new(big.Int).SetString("7237005577332262213973186563042994240857116359379907606001950938285454250989", 10)
	if !ok {
		panic("the order is not a number")
	}
	out := slices.Clone(signature)
	scalar := out[32:]
	slices.Reverse(scalar) // little-endian
	new(big.Int).Add(new(big.Int).SetBytes(scalar), order).FillBytes(scalar)
	slices.Reverse(scalar)
	return out
}

// TestOtherSpellingsOfARevokedToken revokes a token and then verifies other texts that decode to the same bytes. All
// must be refused, because the token's ID is revoked and not its text.
func TestOtherSpellingsOfARevokedToken(t *testing.T) {
	w := newWorld(t)
	w.user("ada", member)
	text := w.token(w.first, tokenRequest{User: "ada", Password: secret})
	require.NoError(t, errOf((&server{s: w.first}).RevokeToken(w.as(w.first, text), &identityv1.RevokeTokenRequest{Token: text})))
	parts := strings.Split(text, ".")
	last := parts[2][len(parts[2])-1]
	spellings := []string{text, text + "\n", parts[0] + ".\n" + parts[1] + "." + parts[2]}
	// The last character of an encoded 64-byte signature has four unused bits.
	for _, c := range "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_" {
		if byte(c) != last {
			spellings = append(spellings, text[:len(text)-1]+string(c))
		}
	}
	for _, spelling := range spellings {
		_, err := w.first.Verify(t.Context(), spelling)
		require.True(t, fault.Is(err, fault.Unauthenticated), "%q: %v", spelling, err)
	}
}

// FuzzVerify checks that Verify returns, for any text, either Unauthenticated or the caller of the valid token.
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

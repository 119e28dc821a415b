package identity

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/go-jose/go-jose/v4/jwt"
	peer "github.com/golang-jwt/jwt/v5"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/keyring"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// unauthenticatedTokens is a number of tokens greater than the capacity of the cache: when they are used in rotation,
// no token is still cached at its next use.
const unauthenticatedTokens = maxChecked + maxChecked/4

// BenchmarkVerify measures how long the verification of a token takes: with a cached token (seen), with one that is not
// cached, and with two other libraries, which check only the signature and the dates. Run it with -cpu 1,2 to compare
// one core with two.
func BenchmarkVerify(b *testing.B) {
	w := newWorld(b)
	w.user("ada", member, cloud.Binding{Role: cloud.ProjectViewer, Org: "default", Project: "default"})
	texts := w.unauthenticatedTokens(w.token(w.first, tokenRequest{User: "ada", Password: secret}))
	ring, err := w.first.Keys(b.Context())
	require.NoError(b, err)

	set := &oidc.StaticKeySet{}
	for _, k := range ring.Published().Keys {
		set.PublicKeys = append(set.PublicKeys, k.Key)
	}
	foreign := oidc.NewVerifier("https://cloud.example", set, &oidc.Config{
		ClientID: token.Audience, SupportedSigningAlgs: []string{oidc.EdDSA}, Now: func() time.Time { return w.at },
	})
	parser := peer.NewParser(peer.WithValidMethods([]string{"EdDSA"}), peer.WithAudience(token.Audience),
		peer.WithIssuer("https://cloud.example"), peer.WithTimeFunc(func() time.Time { return w.at }))
	public := ed25519.PublicKey(ring.Of(keyring.Primary).Public)

	for _, c := range []struct {
		name   string
		tokens []string
		verify func(context.Context, string) error
	}{
		{"seen", texts[:1], func(ctx context.Context, text string) error {
			_, err := w.first.Verify(ctx, text)
			return err
		}},
		{"new", texts, func(ctx context.Context, text string) error {
			_, err := w.first.Verify(ctx, text)
			return err
		}},
		{"go-oidc", texts, func(ctx context.Context, text string) error {
			_, err := foreign.Verify(ctx, text)
			return err
		}},
		{"golang-jwt", texts, func(_ context.Context, text string) error {
			_, err := parser.ParseWithClaims(text, &peer.RegisteredClaims{}, func(*peer.Token) (any, error) { return public, nil })
			return err
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			var next atomic.Int64
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if err := c.verify(b.Context(), c.tokens[int(next.Add(1))%len(c.tokens)]); err != nil {
						b.Error(err)
						return
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}

// unauthenticatedTokens returns valid tokens with the claims of the token like, each with another ID. Their number is
// the constant of the same name.
func (w *world) unauthenticatedTokens(like string) (texts []string) {
	ring, err := w.first.Keys(w.t.Context())
	require.NoError(w.t, err)
	primary := ring.Of(keyring.Primary)
	private, err := primary.Private(w.key)
	require.NoError(w.t, err)
	parsed, err := token.Parse(like)
	require.NoError(w.t, err)
	claims, err := parsed.Verify(private.Public().(ed25519.PublicKey), w.key.Cluster())
	require.NoError(w.t, err)
	say := token.Claims{
		Claims:  jwt.Claims{Issuer: claims.Issuer, Subject: claims.Subject},
		Cluster: claims.Cluster, Kind: claims.Kind, Scope: claims.Scope, Proof: claims.Proof, Epoch: claims.Epoch,
	}
	for range unauthenticatedTokens {
		text, err := token.Sign(private, primary.ID, say, w.at, time.Hour)
		require.NoError(w.t, err)
		texts = append(texts, text)
	}
	return texts
}

// TestBenchmarkTokensAreEvicted checks the premise of BenchmarkVerify: when unauthenticatedTokens tokens are used in
// rotation, none is still cached at its next use.
func TestBenchmarkTokensAreEvicted(t *testing.T) {
	c := newChecked()
	for i := range 2 * unauthenticatedTokens {
		sum := sha256.Sum256([]byte{byte(i % unauthenticatedTokens), byte(i % unauthenticatedTokens >> 8)})
		_, found := c.Get(sum)
		require.False(t, found)
		c.Add(sum, signed{"a key", &token.Claims{}})
	}
}

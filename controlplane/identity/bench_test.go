package identity

import (
	"testing"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/identity/keyring"
	"github.com/trivet-cloud/trivet/controlplane/identity/token"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// What it costs to judge a token: one that this member has seen before, one that it has not, and the same token by the
// OpenID library of others, which looks at the signature and the dates alone.
func BenchmarkVerify(b *testing.B) {
	w := newWorld(b)
	w.user("ada", member, cloud.Binding{Role: cloud.ProjectViewer, Org: "default", Project: "default"})
	text := w.token(w.first, ask{User: "ada", Password: secret})
	b.Run("seen", func(b *testing.B) {
		for b.Loop() {
			if _, err := w.first.Verify(b.Context(), text); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("new", func(b *testing.B) {
		for b.Loop() {
			w.first.checked.newer, w.first.checked.old = nil, nil
			if _, err := w.first.Verify(b.Context(), text); err != nil {
				b.Fatal(err)
			}
		}
	})
	ring, err := w.first.Keys(b.Context())
	require.NoError(b, err)
	set := &oidc.StaticKeySet{}
	for _, k := range ring.Published().Keys {
		set.PublicKeys = append(set.PublicKeys, k.Key)
	}
	require.NotNil(b, ring.Of(keyring.Primary))
	foreign := oidc.NewVerifier("https://cloud.example", set, &oidc.Config{
		ClientID: token.Audience, SupportedSigningAlgs: []string{oidc.EdDSA}, Now: func() time.Time { return w.at },
	})
	b.Run("go-oidc", func(b *testing.B) {
		for b.Loop() {
			if _, err := foreign.Verify(b.Context(), text); err != nil {
				b.Fatal(err)
			}
		}
	})
}

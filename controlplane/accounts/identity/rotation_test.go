package identity

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestExternalVerifierDuringRotation verifies tokens with an OpenID client library that is configured only with the URL
// of the discovery document. While the signing keys are rotated under load, neither the library nor another member may
// refuse a valid token.
func TestExternalVerifierDuringRotation(t *testing.T) {
	w := newWorld(t)
	w.user("ada", member)
	other := w.member(0, false)
	issuer := w.rawResponse(t, w.first)
	provider, err := oidc.NewProvider(t.Context(), issuer)
	require.NoError(t, err)
	foreign := provider.Verifier(&oidc.Config{ClientID: token.Audience, Now: func() time.Time { w.mu.Lock(); defer w.mu.Unlock(); return w.at }})

	text := w.token(w.first, tokenRequest{User: "ada", Password: secret})
	id, err := foreign.Verify(t.Context(), text)
	require.NoError(t, err)
	require.Equal(t, "ada", id.Subject)
	var claims struct{ Kind, Scope, Proof string }
	require.NoError(t, id.Claims(&claims))
	require.Equal(t, struct{ Kind, Scope, Proof string }{"user", "system", "password"}, claims)
	_, err = foreign.Verify(t.Context(), text[:len(text)-4]+"AAAA")
	require.Error(t, err)
	host := w.hostToken(cloud.Tenant{})
	_, err = foreign.Verify(t.Context(), host)
	require.Error(t, err, "the administrator's own tokens are for this cluster only")

	rotate := func() string {
		w.wait(5 * time.Minute)
		out, err := (&server{s: w.first}).RotateKeys(w.admin(), &identityv1.RotateKeysRequest{})
		require.NoError(t, err)
		return out.GetKeys()[0].GetId()
	}
	ada, err := w.first.user(t.Context(), "ada")
	require.NoError(t, err)
	proven := token.Claims{
		Claims: jwt.Claims{Subject: "ada"}, Kind: token.User, Scope: "system", Proof: cloud.ProofPassword, Epoch: ada.Epoch,
	}
	done := make(chan struct{})
	var checks atomic.Int64
	var load sync.WaitGroup
	for range 4 {
		load.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				// Sign directly instead of logging in, because the hashing of passwords would take most of the test's
				// time.
				fresh, err := w.first.issue(t.Context(), proven, time.Hour)
				if !checkNo(t, err) || !checkNo(t, errOf(other.Verify(t.Context(), fresh.text))) ||
					!checkNo(t, errOf(foreign.Verify(t.Context(), fresh.text))) {
					return
				}
				checks.Add(1)
			}
		})
	}
	for range 5 {
		before := checks.Load()
		rotate()
		for checks.Load() < before+20 && !t.Failed() {
			time.Sleep(time.Millisecond)
		}
	}
	close(done)
	load.Wait()
	require.NoError(t, errOf(other.Verify(t.Context(), w.token(w.first, tokenRequest{User: "ada", Password: secret}))))
	err = errOf((&server{s: w.first}).RotateKeys(w.admin(), &identityv1.RotateKeysRequest{}))
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
}

func checkNo(t *testing.T, err error) bool {
	if err != nil {
		t.Errorf("a good token was refused: %v", err)
	}
	return err == nil
}

package identity

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/edge/delay"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// recordDelays replaces the clock of a member's response delays by a stopped one, and its waits by a list. The returned
// function returns the delays since its last call.
func recordDelays(s *Service) func() []time.Duration {
	var all []time.Duration
	at := time.Now()
	s.unproven.Now = func() time.Time { return at }
	s.unproven.Sleep = func(_ context.Context, d time.Duration) { all = append(all, d) }
	return func() []time.Duration {
		out := all
		all = nil
		return out
	}
}

// TestManyTokenRequestsAreDelayed checks that responses to token requests that authenticate no principal are delayed
// after unprovenLimits.Burst per network, for every kind of such a request. Requests from other networks, and those
// with a correct password, must not be delayed.
func TestManyTokenRequestsAreDelayed(t *testing.T) {
	w := newWorld(t)
	w.user("ada", cloud.Binding{Role: cloud.ProjectAdmin, Org: "acme", Project: "web"})
	every := unprovenLimits.Every
	const here, there = "192.0.2.1:1000", "192.0.2.2:1000"
	kinds := map[string]tokenRequest{
		"no password":                             {User: "ada"},
		"a wrong password":                        {User: "ada", Password: "wrong wrong"},
		"a user that does not exist":              {User: "nobody"},
		"a project in which the user has no role": {User: "ada", Password: secret, Org: "acme", Project: "none", Strict: true},
		"a lifetime that is too long":             {User: "ada", TTL: token.MaxTTL + 1},
	}
	for name, q := range kinds {
		t.Run(name, func(t *testing.T) {
			w.first.unproven = delay.New(unprovenLimits)
			since := recordDelays(w.first)
			q.Address = here
			request := func(q tokenRequest) {
				_, proven, _ := w.first.token(t.Context(), q)
				require.False(t, proven)
			}
			for range unprovenLimits.Burst {
				// Wait gets the network without the port, which differs for each connection.
				w.first.unproven.Wait(t.Context(), "192.0.2.1")
			}
			require.Empty(t, since())
			for range 3 {
				request(q)
			}
			require.Equal(t, []time.Duration{every, 2 * every, 3 * every}, since())
			q.Address = there
			request(q)
			require.Empty(t, since(), "requests from another network must not be delayed")
			_, proven, err := w.first.token(t.Context(), tokenRequest{User: "ada", Password: secret, Address: here})
			if name != "a wrong password" { // after too many wrong passwords from a network, the correct one is refused too
				require.NoError(t, err)
				require.True(t, proven)
			}
			require.Empty(t, since(), "a request with the correct password must not be delayed")
		})
	}
}

// TestRefusedExchangesAreDelayed checks that responses to refused ExchangeToken requests are delayed after
// unprovenLimits.Burst too.
func TestRefusedExchangesAreDelayed(t *testing.T) {
	w := newWorld(t)
	since := recordDelays(w.first)
	for range unprovenLimits.Burst + 2 {
		_, err := w.first.exchange(t.Context(), "none", "x", "", tokenRequest{Address: "192.0.2.1:1000"})
		require.Error(t, err)
		require.False(t, fault.Is(err, fault.Internal))
	}
	require.Len(t, since(), 2)
}

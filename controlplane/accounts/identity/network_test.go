package identity

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/password"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// networks returns the stored networks from which a user logged in.
func (w *world) networks(user cloud.UserID) (list []string) {
	w.t.Helper()
	require.NoError(w.t, w.first.opts.Store.Local(func(v *store.View) (err error) {
		list, err = networksOf(v, user)
		return err
	}))
	return list
}

// TestGuessingDoesNotLockUsersOut checks that a member verifies only a bounded number of wrong passwords for a user
// from many networks, even if it was just started. The user must still be able to log in on any member from the network
// of an earlier login.
func TestGuessingDoesNotLockUsersOut(t *testing.T) {
	w := newWorld(t)
	w.user("ada", member)
	login := func(s *Service, from, with string) bool {
		_, proven, err := s.token(t.Context(), tokenRequest{User: "ada", Password: with, Address: from + ":1"})
		require.NoError(t, err)
		return proven
	}
	require.True(t, login(w.first, "198.51.100.7", secret))
	started := w.member(0, false)
	for i := range password.MaxNameMisses {
		require.False(t, login(started, fmt.Sprintf("192.0.2.%d", i), "guess guess"))
	}
	require.False(t, login(started, "203.0.113.5", secret), "the correct password from a network without an earlier login must be refused")
	require.True(t, login(started, "198.51.100.7", secret))
}

// TestLoginNetworks checks that the last maxNetworks (16) different networks of a user's successful logins are stored,
// and that they are deleted with the user.
func TestLoginNetworks(t *testing.T) {
	w := newWorld(t)
	w.user("ada", member)
	login := func(from, with string) {
		_, _, err := w.first.token(t.Context(), tokenRequest{User: "ada", Password: with, Address: from})
		require.NoError(t, err)
	}
	login("192.0.2.1:1", "guess guess")
	require.Empty(t, w.networks("ada"))
	for range 2 {
		login("192.0.2.1:1", secret)
		login("[2001:db8::1]:1", secret)
	}
	require.Equal(t, []string{"192.0.2.1", "2001:db8::/64"}, w.networks("ada"))
	for i := range maxNetworks - 1 {
		_, err := rememberNetworkCommand.Call(t.Context(), w.first.opts.Commands, newNetwork{"ada", fmt.Sprintf("198.51.100.%d", i)})
		require.NoError(t, err)
	}
	list := w.networks("ada")
	require.Len(t, list, maxNetworks)
	require.Equal(t, "2001:db8::/64", list[0])

	require.NoError(t, errOf((&server{s: w.first}).DeleteUser(w.admin(), &identityv1.DeleteUserRequest{UserId: "ada"})))
	require.Empty(t, w.networks("ada"))
	_, err := rememberNetworkCommand.Call(t.Context(), w.first.opts.Commands, newNetwork{"ada", "192.0.2.1"})
	require.NoError(t, err)
	require.Empty(t, w.networks("ada"), "a login that ends after the user was deleted must store no network")
}

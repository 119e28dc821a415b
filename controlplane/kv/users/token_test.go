package users

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"golang.org/x/crypto/bcrypt"
)

const invalidToken = "Unauthenticated: etcdserver: invalid auth token"

func TestTokenExpiresAfterFiveMinutes(t *testing.T) {
	w := newWorld(t)
	w.enable()
	token := w.token(Root, "toor")
	w.now = w.now.Add(DefaultTokenTTL - time.Millisecond)
	require.Equal(t, Root, w.tokenUser(token))
	w.now = w.now.Add(time.Millisecond)
	require.Equal(t, invalidToken, w.tokenUser(token))
}

func TestChangedTokenIsInvalid(t *testing.T) {
	w := newWorld(t)
	w.enable()
	token := w.token(Root, "toor")
	require.True(t, IsToken(token))
	for i := range token {
		for _, c := range "Aa_0" {
			changed := token[:i] + string(c) + token[i+1:]
			if changed != token {
				require.Equal(t, invalidToken, w.tokenUser(changed))
			}
		}
	}
	for _, other := range []string{"", "kv1.", token + "A", token[:len(token)-1], "prefix.17", strings.Repeat("A", 1<<20), token + "\n"} {
		require.Equal(t, invalidToken, w.tokenUser(other), other)
	}
	w.tokens = NewTokens([]byte("another key"), 0)
	require.Equal(t, invalidToken, w.tokenUser(token))
}

// TestOldTokens checks that a token becomes invalid when its user gets another password or Auth is disabled, and that
// the tokens of other users remain valid.
func TestOldTokens(t *testing.T) {
	w := newWorld(t)
	w.enable()
	w.addUser("ann", "a")
	ann, root := w.token("ann", "a"), w.token(Root, "toor")
	r := &pb.AuthUserChangePasswordRequest{Name: "ann", Password: "b"}
	require.NoError(t, HashChange(r, MinCost))
	must(w, (*State).UserChangePassword, r)
	require.Equal(t, invalidToken, w.tokenUser(ann))
	require.Equal(t, Root, w.tokenUser(root))
	ann = w.token("ann", "b")
	require.Equal(t, "ann", w.tokenUser(ann))
	must(w, (*State).Disable, &pb.AuthDisableRequest{})
	must(w, (*State).Enable, &pb.AuthEnableRequest{})
	require.Equal(t, invalidToken, w.tokenUser(ann))
	require.Equal(t, invalidToken, w.tokenUser(root))
}

// TestTokenNewerThanState checks that a state of an earlier revision than the token's reports Behind and refuses the
// token.
func TestTokenNewerThanState(t *testing.T) {
	w := newWorld(t)
	w.enable()
	early := w.state()
	must(w, (*State).RoleAdd, &pb.AuthRoleAddRequest{Name: "r"})
	c, err := w.tokens.Open(w.token(Root, "toor"), w.now)
	require.NoError(t, err)
	require.True(t, early.Behind(c))
	_, err = early.Accept(c)
	require.Equal(t, invalidToken, errorText(err))
	require.False(t, w.state().Behind(c))
}

func TestUnknownUserHashHasDefaultCost(t *testing.T) {
	require.ErrorIs(t, bcrypt.CompareHashAndPassword([]byte(unknownUserHash), []byte("x")), bcrypt.ErrMismatchedHashAndPassword)
	cost, err := bcrypt.Cost([]byte(unknownUserHash))
	require.NoError(t, err)
	require.Equal(t, DefaultCost, cost)
}

func TestPasswordsAreStoredHashed(t *testing.T) {
	w := newWorld(t)
	_, _, err := w.state().UserAdd(&pb.AuthUserAddRequest{Name: "ann", Password: "plain"})
	require.ErrorIs(t, err, errNotHashed)
	w.addUser("ann", "plain")
	for name, value := range w.records {
		require.NotContains(t, string(value), "plain", name)
	}
}

func FuzzToken(f *testing.F) {
	tokens := NewTokens([]byte("key"), 0)
	now := time.UnixMilli(1_000_000)
	f.Add(tokens.Issue("ann", 7, now))
	f.Add("kv1.AAAA")
	f.Fuzz(func(t *testing.T, token string) {
		if c, err := tokens.Open(token, now); err == nil {
			require.Equal(t, tokens.Issue(c.User, c.Revision, now), token)
		}
	})
}

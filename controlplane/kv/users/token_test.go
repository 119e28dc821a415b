package users

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"golang.org/x/crypto/bcrypt"
)

const invalid = "Unauthenticated: etcdserver: invalid auth token"

func TestATokenLivesFiveMinutes(t *testing.T) {
	w := newWorld(t)
	w.enable()
	token := w.token(Root, "toor")
	w.now = w.now.Add(DefaultTokenLife - time.Millisecond)
	require.Equal(t, Root, w.who(token))
	w.now = w.now.Add(time.Millisecond)
	require.Equal(t, invalid, w.who(token))
}

func TestATokenThatWasChangedIsNone(t *testing.T) {
	w := newWorld(t)
	w.enable()
	token := w.token(Root, "toor")
	require.True(t, IsToken(token))
	for i := range token {
		for _, c := range "Aa_0" {
			changed := token[:i] + string(c) + token[i+1:]
			if changed != token {
				require.Equal(t, invalid, w.who(changed))
			}
		}
	}
	for _, other := range []string{"", "kv1.", token + "A", token[:len(token)-1], "prefix.17", strings.Repeat("A", 1<<20), token + "\n"} {
		require.Equal(t, invalid, w.who(other), other)
	}
	w.tokens = NewTokens([]byte("another key"), 0)
	require.Equal(t, invalid, w.who(token))
}

// TestOldTokens checks that a token ends when its user gets another password or Auth is disabled, and that the tokens of
// other users stay valid.
func TestOldTokens(t *testing.T) {
	w := newWorld(t)
	w.enable()
	w.addUser("ann", "a")
	ann, root := w.token("ann", "a"), w.token(Root, "toor")
	r := &pb.AuthUserChangePasswordRequest{Name: "ann", Password: "b"}
	require.NoError(t, HashChange(r, MinCost))
	must(w, (*State).UserChangePassword, r)
	require.Equal(t, invalid, w.who(ann))
	require.Equal(t, Root, w.who(root))
	ann = w.token("ann", "b")
	require.Equal(t, "ann", w.who(ann))
	must(w, (*State).Disable, &pb.AuthDisableRequest{})
	must(w, (*State).Enable, &pb.AuthEnableRequest{})
	require.Equal(t, invalid, w.who(ann))
	require.Equal(t, invalid, w.who(root))
}

// A member that has not applied what the token was issued upon may wait for it; a state that never had it refuses it.
func TestATokenOfALaterState(t *testing.T) {
	w := newWorld(t)
	w.enable()
	early := w.state()
	must(w, (*State).RoleAdd, &pb.AuthRoleAddRequest{Name: "r"})
	c, err := w.tokens.Open(w.token(Root, "toor"), w.now)
	require.NoError(t, err)
	require.True(t, early.Behind(c))
	_, err = early.Accept(c)
	require.Equal(t, invalid, said(err))
	require.False(t, w.state().Behind(c))
}

func TestWhoIsUnknownTakesAsLong(t *testing.T) {
	require.ErrorIs(t, bcrypt.CompareHashAndPassword([]byte(nobody), []byte("x")), bcrypt.ErrMismatchedHashAndPassword)
	cost, err := bcrypt.Cost([]byte(nobody))
	require.NoError(t, err)
	require.Equal(t, DefaultCost, cost)
}

func TestAPasswordIsNeverStored(t *testing.T) {
	w := newWorld(t)
	_, _, err := w.state().UserAdd(&pb.AuthUserAddRequest{Name: "ann", Password: "plain"})
	require.ErrorIs(t, err, errUnhashed)
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

package identity

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestRegistrationIsRateLimited sends 40 unauthenticated requests to register a name, with a burst of 20 allowed.
// Exactly the first 20 must succeed.
func TestRegistrationIsRateLimited(t *testing.T) {
	w := newWorld(t)
	handler := rest.New(rest.Options{Service: fault.Identity, Name: "identity", Log: slog.New(slog.DiscardHandler), Metrics: rest.NewMetrics(prometheus.NewRegistry())})
	w.first.Routes(handler, false)
	w.first.names.limit.SetBurst(20)
	w.first.names.limit.SetLimit(0)
	codes := map[int]int{}
	for i := range 40 {
		q := httptest.NewRequest(http.MethodPost, "http://127.0.0.1/api/v1/users", strings.NewReader(fmt.Sprintf(`{"id":"n%d","name":"x"}`, i)))
		q.Header.Set("Content-Type", "application/json")
		q.RemoteAddr = "127.0.0.1:1"
		q = q.WithContext(context.WithValue(q.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 8083}))
		a := httptest.NewRecorder()
		handler.ServeHTTP(a, q)
		codes[a.Code]++
	}
	require.Equal(t, map[int]int{201: 20, 500: 20}, codes)
}

// TestRegisteredNamesAreNotTaken checks that an administrator can create a user whose name was registered over REST,
// and that the user has the administrator's values. It returns AlreadyExists if the name has a credential, is disabled,
// or was created by an administrator.
func TestRegisteredNamesAreNotTaken(t *testing.T) {
	w := newWorld(t)
	r := &server{s: w.first}
	register := func(id cloud.UserID) {
		require.NoError(t, errOf(createUserCommand.Call(t.Context(), w.first.opts.Commands, newName{ID: id, Name: "Squatter", Open: true})))
	}
	create := func(id string) (*identityv1.User, error) {
		return r.CreateUser(w.admin(), &identityv1.CreateUserRequest{Id: id, Name: "Ada Lovelace"})
	}
	register("ada")
	w.wait(time.Hour)
	u, err := create("ada")
	require.NoError(t, err)
	require.Equal(t, []any{"Ada Lovelace", w.at.UnixMilli(), false}, []any{u.GetName(), u.GetCreatedAt(), u.GetRegistered()})
	_, err = create("ada")
	require.True(t, fault.Is(err, fault.AlreadyExists), "an administrator made it: %v", err)
	require.True(t, fault.Is(errOf(createUserCommand.Call(t.Context(), w.first.opts.Commands, newName{ID: "ada", Open: true})), fault.AlreadyExists))

	for id, give := range map[string]func(id string) error{
		"with-password": func(id string) error {
			return errOf(r.SetPassword(w.admin(), &identityv1.SetPasswordRequest{UserId: id, Password: secret}))
		},
		"disabled": func(id string) error {
			return errOf(r.DisableUser(w.admin(), &identityv1.DisableUserRequest{UserId: id}))
		},
	} {
		register(cloud.UserID(id))
		require.NoError(t, give(id))
		_, err = create(id)
		require.True(t, fault.Is(err, fault.AlreadyExists), "%s: %v", id, err)
	}
	require.True(t, fault.Is(errOf(create("admin")), fault.AlreadyExists))
	require.NoError(t, w.first.opts.Store.Local(func(v *store.View) error {
		count, err := openNames.Get(v, "all")
		require.EqualValues(t, 2, *count, "the name that was created anew makes room for another")
		return err
	}))
}

// TestRegisteredNamesAreCounted checks that openNames counts the names that unauthenticated callers registered, and
// that deleting such a name decrements it.
func TestRegisteredNamesAreCounted(t *testing.T) {
	w := newWorld(t)
	count := func() (n uint64) {
		require.NoError(t, w.first.opts.Store.Local(func(v *store.View) error {
			c, err := openNames.Get(v, "all")
			if c != nil {
				n = *c
			}
			return err
		}))
		return n
	}
	for _, name := range []cloud.UserID{"a", "b"} {
		require.NoError(t, errOf(createUserCommand.Call(t.Context(), w.first.opts.Commands, newName{ID: name, Open: true})))
	}
	w.user("ada")
	require.EqualValues(t, 2, count())
	for _, name := range []string{"a", "ada"} {
		require.NoError(t, errOf((&server{s: w.first}).DeleteUser(w.admin(), &identityv1.DeleteUserRequest{UserId: name})))
	}
	require.EqualValues(t, 1, count())
}

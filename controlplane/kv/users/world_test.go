package users

import (
	"iter"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/status"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// world holds the records of a keyspace, as the engine would store them, and a clock.
type world struct {
	t       *testing.T
	records map[string][]byte
	tokens  *Tokens
	now     time.Time
}

func newWorld(t *testing.T) *world {
	return &world{t: t, records: map[string][]byte{}, tokens: NewTokens([]byte("0123456789abcdef0123456789abcdef"), 0), now: time.UnixMilli(1_000_000)}
}

func (w *world) all() iter.Seq2[[]byte, []byte] {
	return func(yield func([]byte, []byte) bool) {
		for _, name := range slices.Sorted(maps.Keys(w.records)) {
			if !yield([]byte(name), w.records[name]) {
				return
			}
		}
	}
}

func (w *world) state() *State {
	w.t.Helper()
	s, err := Load(w.all())
	require.NoError(w.t, err)
	return s
}

// apply executes steps on the records, as the engine does.
func (w *world) apply(steps []command.Step) {
	for _, s := range steps {
		switch s.Kind {
		case command.StepSetRecord:
			w.records[string(s.Key)] = s.Value
		case command.StepDeleteRecord:
			require.Contains(w.t, w.records, string(s.Key))
			delete(w.records, string(s.Key))
		default:
			w.t.Fatalf("step of kind %d", s.Kind)
		}
	}
}

// do executes a request and returns its response, or its error as "code: text".
func do[Q, R any](w *world, f func(*State, Q) ([]command.Step, R, error), q Q) (R, string) {
	steps, r, err := f(w.state(), q)
	if err != nil {
		require.Empty(w.t, steps)
		return r, errorText(err)
	}
	w.apply(steps)
	return r, ""
}

func must[Q, R any](w *world, f func(*State, Q) ([]command.Step, R, error), q Q) {
	w.t.Helper()
	_, err := do(w, f, q)
	require.Empty(w.t, err)
}

func errorText(err error) string {
	s := status.Convert(err)
	return s.Code().String() + ": " + s.Message()
}

func (w *world) addUser(name, password string) {
	w.t.Helper()
	r := &pb.AuthUserAddRequest{Name: name, Password: password}
	require.NoError(w.t, HashAdd(r, MinCost))
	must(w, (*State).UserAdd, r)
}

// enable adds the user root with the password "toor" and the role root, and enables Auth.
func (w *world) enable() {
	w.t.Helper()
	w.addUser(Root, "toor")
	must(w, (*State).UserGrantRole, &pb.AuthUserGrantRoleRequest{User: Root, Role: Root})
	must(w, (*State).Enable, &pb.AuthEnableRequest{})
}

func (w *world) token(user, password string) string {
	w.t.Helper()
	r, err := w.state().Authenticate(&pb.AuthenticateRequest{Name: user, Password: password}, w.tokens, w.now)
	require.NoError(w.t, err)
	return r.Token
}

// tokenUser returns the user of a token, or the text of the error.
func (w *world) tokenUser(token string) string {
	c, err := w.tokens.Open(token, w.now)
	if err != nil {
		return errorText(err)
	}
	user, err := w.state().Accept(c)
	if err != nil {
		return errorText(err)
	}
	return user
}

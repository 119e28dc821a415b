package store

import (
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/fxamacker/cbor/v2"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// answering is a store in which calls with idempotency keys are made.
type answering struct {
	*Store
	t    *testing.T
	runs int
}

func newAnswering(t *testing.T) *answering {
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	return &answering{Store: New(Options{Engine: engine, Proposer: NewDirect(engine), PageKey: make([]byte, 32)}), t: t}
}

// call makes calls of ada's with these keys, and returns how many of them were replayed.
func (a *answering) call(at Place, method string, keys ...string) (replays int) {
	a.t.Helper()
	_, err := a.Update(a.t.Context(), func(tx *Tx) error {
		replays = 0
		for _, key := range keys {
			_, replayed, err := Idempotent(tx, &cloud.Caller{User: "ada", IdempotencyKey: key}, at, method, [32]byte{}, func() (int, error) {
				a.runs++
				return a.runs, nil
			})
			if err != nil {
				return err
			}
			if replayed {
				replays++
			}
		}
		return nil
	})
	require.NoError(a.t, err)
	return replays
}

// A tenant calls its project like the org of another tenant and keeps as many answers as it may. It shares none with the
// org, and none of the org's goes.
func TestAProjectNamedLikeAnOrg(t *testing.T) {
	a := newAnswering(t)
	require.Zero(t, a.call(InOrg("acme"), "CreateImage", "k"))
	require.Zero(t, a.call(InProject("acme"), "CreateImage", "k"), "the same key and method elsewhere")
	require.Zero(t, a.call(OfPrincipal("acme"), "CreateImage", "k"))
	const atOnce = 1000
	for from := 0; from <= MaxAnswers; from += atOnce {
		keys := make([]string, atOnce)
		for i := range keys {
			keys[i] = fmt.Sprint("flood", from+i)
		}
		require.Zero(t, a.call(InProject("acme"), "CreateVm", keys...))
	}
	require.Equal(t, 1, a.call(InOrg("acme"), "CreateImage", "k"))
	require.Zero(t, a.call(InProject("acme"), "CreateImage", "k"), "its own oldest went")
}

// An answer that was kept before the kinds of places were told apart is given again.
func TestAnswersOfBefore(t *testing.T) {
	a := newAnswering(t)
	a.call(InOrg("acme"), "CreateImage", "k")
	text, err := cbor.Marshal(1)
	require.NoError(t, err)
	_, err = a.Update(t.Context(), func(tx *Tx) error {
		list, _, err := answers.List(tx, 0, InOrg("acme").path())
		if err != nil {
			return err
		}
		for _, r := range list {
			answers.Delete(tx, r.Path...)
			r.Path[0] = "acme"
			require.Equal(t, text, r.Value.Answer)
			answers.Put(tx, r.Value, r.Path...)
			answerOrder.Put(tx, &r.Path[1], "acme", turn(0))
		}
		answerTurns.Put(tx, &turns{Next: 1}, "acme")
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, 1, a.call(InOrg("acme"), "CreateImage", "k"))
	require.Zero(t, a.call(InProject("other"), "CreateImage", "k"))
	require.Zero(t, a.call(InOrg("acme"), "CreateImage", "new"))
	require.Equal(t, 1, a.call(InOrg("acme"), "CreateImage", "new"))
}

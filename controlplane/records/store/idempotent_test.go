package store

import (
	"fmt"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/fxamacker/cbor/v2"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// idempotencyFixture is a store with a clock, for calls with idempotency keys. runs counts the calls that were run
// instead of replayed.
type idempotencyFixture struct {
	*Store
	t    *testing.T
	runs int
	now  time.Time
}

func newIdempotencyFixture(t *testing.T) *idempotencyFixture {
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	a := &idempotencyFixture{t: t, now: time.Now()}
	a.Store = New(Options{Engine: engine, Proposer: NewDirect(engine), PageKey: make([]byte, 32), Now: func() time.Time { return a.now }})
	return a
}

// forgetPlace calls ForgetPlace for the place at.
func (a *idempotencyFixture) forgetPlace(at Place) {
	a.t.Helper()
	_, err := a.Update(a.t.Context(), func(tx *Tx) error { return ForgetPlace(tx, at) })
	require.NoError(a.t, err)
}

// sweep calls ForgetAnswers until nothing is left to delete, with at most limit deletions per transaction.
func (a *idempotencyFixture) sweep(limit int) {
	a.t.Helper()
	for more := true; more; {
		_, err := a.Update(a.t.Context(), func(tx *Tx) (err error) { more, err = ForgetAnswers(tx, limit); return err })
		require.NoError(a.t, err)
	}
}

// rows returns the number of records in each of the three tables of stored responses.
func (a *idempotencyFixture) rows() (answerRows, ordered, places int) {
	a.t.Helper()
	require.NoError(a.t, a.View(a.t.Context(), func(v *View) error {
		list, _, err := answers.List(v, 0)
		require.NoError(a.t, err)
		order, _, err := answerOrder.List(v, 0)
		require.NoError(a.t, err)
		turns, _, err := answerTurns.List(v, 0)
		answerRows, ordered, places = len(list), len(order), len(turns)
		return err
	}))
	return answerRows, ordered, places
}

// call makes one call as ada for each key and returns how many of them got a stored response.
func (a *idempotencyFixture) call(at Place, method string, keys ...string) (replays int) {
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

// TestProjectWithTheIDOfAnOrg stores the most responses for a project that has the same ID as another tenant's org. The
// two places must not share responses, and no response of the org may be deleted.
func TestProjectWithTheIDOfAnOrg(t *testing.T) {
	a := newIdempotencyFixture(t)
	require.Zero(t, a.call(InOrg("acme"), "CreateImage", "k"))
	require.Zero(t, a.call(InProject("acme"), "CreateImage", "k"), "a project with the org's ID does not share the org's responses")
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
	require.Zero(t, a.call(InProject("acme"), "CreateImage", "k"), "the project's oldest response has been deleted")
}

// TestAnswersOfEarlierVersions stores a response as earlier versions did, under a place without a kind. A repeated call
// must get that response.
func TestAnswersOfEarlierVersions(t *testing.T) {
	a := newIdempotencyFixture(t)
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
			answerOrder.Put(tx, &r.Path[1], "acme", sequenceKey(0))
		}
		answerTurns.Put(tx, &sequence{Next: 1}, "acme")
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, 1, a.call(InOrg("acme"), "CreateImage", "k"))
	require.Zero(t, a.call(InProject("other"), "CreateImage", "k"))
	require.Zero(t, a.call(InOrg("acme"), "CreateImage", "new"))
	require.Equal(t, 1, a.call(InOrg("acme"), "CreateImage", "new"))
}

// TestDeletedProjectsLeaveNoRecords checks that all records of a deleted project are deleted once its responses have
// expired. Until then ForgetAnswers must preserve sequence.Forgotten, so that a new project with the same ID gets no
// response of the deleted one.
func TestDeletedProjectsLeaveNoRecords(t *testing.T) {
	for _, limit := range []int{1, 2, 100} {
		t.Run(fmt.Sprint("in steps of ", limit), func(t *testing.T) {
			a := newIdempotencyFixture(t)
			web, lab := InProject("web"), InProject("lab")
			require.Zero(t, a.call(web, "CreateVm", "early"))
			require.Zero(t, a.call(lab, "CreateVm", "k"))
			a.now = a.now.Add(12 * time.Hour)
			require.Zero(t, a.call(web, "CreateVm", "late"))
			a.forgetPlace(web)

			a.now = a.now.Add(13 * time.Hour)
			a.sweep(limit)
			kept, ordered, places := a.rows()
			require.Equal(t, []int{1, 1, 1}, []int{kept, ordered, places}, "only the later response of project web is left")
			require.Zero(t, a.call(web, "CreateVm", "late"), "a response from before the project's deletion is not returned")
			require.Equal(t, 1, a.call(web, "CreateVm", "late"))

			a.now = a.now.Add(25 * time.Hour)
			a.sweep(limit)
			kept, ordered, places = a.rows()
			require.Zero(t, kept+ordered+places)
			require.Zero(t, a.call(web, "CreateVm", "early", "late"))
			require.Equal(t, 2, a.call(web, "CreateVm", "early", "late"), "new responses of the project are returned again")
			a.forgetPlace(web)
			require.Zero(t, a.call(web, "CreateVm", "early", "late"))
		})
	}
}

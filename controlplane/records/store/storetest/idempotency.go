package storetest

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func idempotency(t *testing.T, s *store.Store, _ *Clock) {
	create := func(key, body string) (string, bool, error) {
		var out string
		var replayed bool
		_, err := s.Update(t.Context(), func(tx *store.Tx) (err error) {
			caller := &cloud.Caller{User: "ada", IdempotencyKey: key}
			out, replayed, err = store.Idempotent(tx, caller, store.InProject("p"), "create", [32]byte([]byte(fmt.Sprintf("%32s", body))), func() (string, error) {
				a, err := accounts.Get(tx, "p", "n")
				if err != nil {
					return "", err
				}
				if a == nil {
					a = &account{}
				}
				if body == "fails" {
					return "", fault.New(fault.FailedPrecondition, "no")
				}
				a.Balance++
				accounts.Put(tx, a, "p", "n")
				return fmt.Sprint("made ", a.Balance), nil
			})
			return err
		})
		return out, replayed, err
	}
	out, replayed, err := create("k", "b")
	require.NoError(t, err)
	require.Equal(t, "made 1", out)
	require.False(t, replayed)
	out, replayed, err = create("k", "b")
	require.NoError(t, err)
	require.Equal(t, "made 1", out)
	require.True(t, replayed)
	_, _, err = create("k", "other")
	require.True(t, fault.Is(err, fault.InvalidArgument))
	out, _, err = create("", "b")
	require.NoError(t, err)
	require.Equal(t, "made 2", out)
	_, _, err = create("f", "fails")
	require.True(t, fault.Is(err, fault.FailedPrecondition))
	out, replayed, err = create("f", "b") // the failed call must not have stored a response
	require.NoError(t, err)
	require.Equal(t, "made 3", out)
	require.False(t, replayed)
}

func answersExpire(t *testing.T, s *store.Store, clock *Clock) {
	runs := 0
	do := func(key string) {
		_, err := s.Update(t.Context(), func(tx *store.Tx) error {
			_, _, err := store.Idempotent(tx, &cloud.Caller{User: "ada", IdempotencyKey: key}, store.InProject("p"), "m", [32]byte{}, func() (int, error) {
				runs++
				return runs, nil
			})
			return err
		})
		require.NoError(t, err)
	}
	sweep := func() {
		for more := true; more; {
			_, err := s.Update(t.Context(), func(tx *store.Tx) (err error) { more, err = store.ForgetAnswers(tx, 2); return err })
			require.NoError(t, err)
		}
	}
	for i := range 5 {
		do(fmt.Sprint(i))
	}
	clock.Advance(23 * time.Hour)
	do("late")
	sweep()
	do("0")
	require.Equal(t, 6, runs, "nothing was old enough")
	clock.Advance(2 * time.Hour)
	sweep()
	do("late")
	require.Equal(t, 6, runs)
	do("0")
	require.Equal(t, 7, runs, "its answer was forgotten")
}

func placeForgotten(t *testing.T, s *store.Store, clock *Clock) {
	runs := 0
	do := func(place, key string) (out int) {
		_, err := s.Update(t.Context(), func(tx *store.Tx) (err error) {
			out, _, err = store.Idempotent(tx, &cloud.Caller{User: "ada", IdempotencyKey: key}, store.InProject(cloud.ProjectID(place)), "m", [32]byte{}, func() (int, error) {
				runs++
				return runs, nil
			})
			return err
		})
		require.NoError(t, err)
		return out
	}
	forget := func(place string) {
		_, err := s.Update(t.Context(), func(tx *store.Tx) error { return store.ForgetPlace(tx, store.InProject(cloud.ProjectID(place))) })
		require.NoError(t, err)
	}
	forget("p")
	require.Equal(t, 1, do("p", "a"))
	require.Equal(t, 2, do("p", "b"))
	require.Equal(t, 3, do("q", "a"))
	forget("p")
	require.Equal(t, 4, do("p", "a"), "the answer is of before")
	require.Equal(t, 4, do("p", "a"), "and this one is remembered, in the same millisecond")
	require.Equal(t, 3, do("q", "a"), "another place is not touched")
	clock.Advance(25 * time.Hour)
	for more := true; more; {
		_, err := s.Update(t.Context(), func(tx *store.Tx) (err error) { more, err = store.ForgetAnswers(tx, 1); return err })
		require.NoError(t, err)
	}
	require.Equal(t, 5, do("p", "a"))
	require.Equal(t, 5, do("p", "a"))
}

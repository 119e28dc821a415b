package load

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var zero = time.Unix(1000, 0)

func at(ms int) time.Time { return zero.Add(time.Duration(ms) * time.Millisecond) }

func TestLongestGap(t *testing.T) {
	broken := errors.New("broken")
	all := Answers{{Due: at(0), Done: at(10)}, {Due: at(20), Done: at(500)}, {Due: at(30), Done: at(300), Err: broken}, {Due: at(40), Done: at(90)}}
	require.Equal(t, 410*time.Millisecond, all.LongestGap(at(0), at(600)), "a failed call must not count as a response")
	require.Equal(t, 500*time.Millisecond, all.LongestGap(at(500), at(1000)), "the gap must extend to the end if there is no response")
	require.Equal(t, 300*time.Millisecond, Answers(nil).LongestGap(at(0), at(300)))
}

func TestAnswers(t *testing.T) {
	broken, other := errors.New("broken"), errors.New("other")
	all := Answers{{Due: at(0), Done: at(10)}, {Due: at(20), Done: at(21), Err: broken}, {Due: at(30), Done: at(90)}, {Due: at(90), Done: at(91), Err: other}}
	require.Equal(t, []time.Duration{10 * time.Millisecond, 60 * time.Millisecond}, all.Latencies())
	n, first := all.Failed()
	require.Equal(t, 2, n)
	require.Equal(t, broken, first)
	require.Equal(t, all[1:3], all.Within(at(20), at(90)), "the end of the range must be excluded")
}

func TestClosedAsksEachOnce(t *testing.T) {
	var asked [100]atomic.Int32
	all, err := Closed(t.Context(), 7, len(asked), func(_ context.Context, caller, i int) error {
		asked[i].Add(1)
		if i == 50 {
			return errors.New("broken")
		}
		if caller < 0 || caller > 6 {
			return errors.New("no such caller")
		}
		return nil
	})
	require.NoError(t, err)
	for i := range asked {
		require.EqualValues(t, 1, asked[i].Load())
	}
	n, first := all.Failed()
	require.Equal(t, 1, n)
	require.EqualError(t, first, "broken")
	require.Len(t, all.Latencies(), 99)
}

func TestForAsksUntilTheTimeIsOver(t *testing.T) {
	var asked [3]atomic.Int32
	all, err := For(t.Context(), len(asked), 10*time.Millisecond, func(_ context.Context, caller int) error {
		if asked[caller].Add(1) == 1 {
			return errors.New("broken")
		}
		return nil
	})
	require.NoError(t, err)
	n, _ := all.Failed()
	require.Equal(t, 3, n)
	require.EqualValues(t, asked[0].Load()+asked[1].Load()+asked[2].Load(), len(all))
	all, err = For(t.Context(), 3, 0, func(context.Context, int) error { return nil })
	require.NoError(t, err)
	require.Len(t, all, 3, "each client must make one call at least")
	ctx, cancel := context.WithCancel(t.Context())
	_, err = For(ctx, 2, time.Hour, func(context.Context, int) error { cancel(); return nil })
	require.ErrorIs(t, err, context.Canceled)
}

func TestOpenGoesOnWhileAnswersAreMissing(t *testing.T) {
	hold, enough := make(chan struct{}), make(chan struct{})
	var asked atomic.Int32
	o := StartOpen(t.Context(), 10_000, func(context.Context, int) error {
		if asked.Add(1) == 20 {
			close(enough)
		}
		<-hold
		return nil
	})
	<-enough
	close(hold)
	all, err := o.Stop()
	require.NoError(t, err)
	require.EqualValues(t, asked.Load(), len(all))
}

func TestKeysMatchEtcdsBenchmark(t *testing.T) {
	require.Equal(t, "\x00\x00\x00\x00\x00\x00\x00\x00", ToolKey(0))
	require.Equal(t, "\x80\x01\x00\x00\x00\x00\x00\x00", ToolKey(64))
	require.Equal(t, "k00000000042", Key(42))
}

func TestValuesDiffer(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	a, b := Value(random, 13), Value(random, 13)
	require.Len(t, a, 13)
	require.NotEqual(t, a, b)
}

func TestStamp(t *testing.T) {
	value := Stamp(at(7), 64)
	require.Len(t, value, 64)
	sent, ok := sentAt([]byte(value))
	require.True(t, ok)
	require.True(t, at(7).Equal(sent))
	for _, other := range []string{"", "1234", "x y"} {
		_, ok = sentAt([]byte(other))
		require.False(t, ok, other)
	}
}

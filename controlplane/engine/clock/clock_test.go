package clock

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

// TestOffset checks that offset finds the difference of a clock from the majority, and returns known=false if there is
// no majority.
func TestOffset(t *testing.T) {
	const s, m = time.Second, time.Minute
	for _, c := range []struct {
		name    string
		own     time.Duration
		others  []time.Duration
		members int
		want    time.Duration
		known   bool
	}{
		{"single member", 0, nil, 1, 0, false},
		{"no response from the others", 0, nil, 3, 0, false},
		{"one response of two", 2 * s, []time.Duration{0}, 3, s, true},
		{"two of five clocks known: no majority", 0, []time.Duration{0}, 5, 0, false},
		{"three of five clocks known", 0, []time.Duration{s, 3 * s}, 5, -s, true},
		{"all clocks agree", 5 * s, []time.Duration{5 * s, 5 * s}, 3, 0, true},
		{"own clock is ahead", 10 * m, []time.Duration{0, s}, 3, 10*m - s, true},
		{"own clock is behind", -10 * m, []time.Duration{0, s}, 3, -10 * m, true},
		{"another clock is ahead", 0, []time.Duration{10 * m, s}, 3, -s, true},
		{"another clock is behind", s, []time.Duration{-10 * m, 0}, 3, s, true},
		{"two clocks differ, the third is unknown", 0, []time.Duration{2 * m}, 3, 0, false},
		{"two clocks differ, there is no third", 2 * m, []time.Duration{0}, 2, 0, false},
		{"all three clocks differ: the median is used", 10 * m, []time.Duration{0, -10 * m}, 3, 10 * m, true},
		{"two of four clocks differ from the other two", 0, []time.Duration{0, 10 * m, 10 * m}, 4, 0, false},
		{"one of four clocks is wrong", 10 * m, []time.Duration{0, 0, 2 * s}, 4, 10*m - s, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, known, apart := offset(c.own, c.others, c.members)
			require.Equal(t, c.known, known)
			require.Equal(t, strings.HasPrefix(c.name, "two clocks differ") || strings.HasPrefix(c.name, "two of four"), apart > 0)
			require.Equal(t, c.want, got)
		})
	}
}

// testCluster is a set of members that request each other's time, in a synctest bubble.
type testCluster struct {
	t      *testing.T
	clocks map[uint64]*Clock
	logs   map[uint64]*logBuffer

	// mu guards the following fields while a clock runs.
	mu    sync.Mutex
	ahead map[uint64]time.Duration
	// trip is how long a request takes, and also how long its response takes.
	trip time.Duration
	// back is an additional delay of responses.
	back time.Duration
	// cut lists members that cannot reach others or be reached. old lists members that do not support the command. lies
	// has responses that members send instead of their time.
	cut  map[uint64]bool
	old  map[uint64]bool
	lies map[uint64][]byte
}

func newTestCluster(t *testing.T, members int) *testCluster {
	h := &testCluster{
		t: t, clocks: map[uint64]*Clock{}, ahead: map[uint64]time.Duration{}, logs: map[uint64]*logBuffer{}, trip: time.Millisecond,
		cut: map[uint64]bool{}, old: map[uint64]bool{}, lies: map[uint64][]byte{},
	}
	for id := range uint64(members) {
		id++
		h.logs[id] = &logBuffer{}
		h.clocks[id] = New(Options{
			Log: slog.New(slog.NewTextHandler(h.logs[id], nil)),
			Wall: func() time.Time {
				h.mu.Lock()
				defer h.mu.Unlock()
				return time.Now().Add(h.ahead[id]).Round(0)
			},
		})
		h.clocks[id].Attach(testPeers{h, id})
	}
	return h
}

// logBuffer is an io.Writer that collects log output.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (p *logBuffer) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.Write(b)
}

// take returns the log output since the last call of take.
func (p *logBuffer) take() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer p.text.Reset()
	return p.text.String()
}

// testPeers implements Peers for one member of a testCluster.
type testPeers struct {
	h  *testCluster
	id uint64
}

func (s testPeers) Members() map[uint64]string {
	out := map[uint64]string{}
	for id := range s.h.clocks {
		if id != s.id {
			out[id] = "there"
		}
	}
	return out
}

func (s testPeers) Direct(ctx context.Context, member uint64, command string, body []byte) ([]byte, error) {
	s.h.mu.Lock()
	away := s.h.cut[member] || s.h.cut[s.id]
	s.h.mu.Unlock()
	if away {
		return nil, errors.New("cannot be reached")
	}
	if s.h.old[member] {
		return nil, errors.New("this member knows no command " + command)
	}
	wait := func(more time.Duration) error {
		select {
		case <-time.After(s.h.trip + more):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := wait(0); err != nil {
		return nil, err
	}
	answer, err := s.h.clocks[member].Answer(ctx, s.id, body)
	if lie, ok := s.h.lies[member]; ok {
		answer = lie
	}
	if err := wait(s.h.back); err != nil {
		return nil, err
	}
	return answer, err
}

func (h *testCluster) round(ids ...uint64) {
	for _, id := range ids {
		h.clocks[id].round(h.t.Context())
	}
}

func (h *testCluster) skew(id uint64, want time.Duration) {
	h.t.Helper()
	got, known := h.clocks[id].Skew()
	require.True(h.t, known)
	require.InDelta(h.t, want.Seconds(), got.Seconds(), 0.01)
}

func (h *testCluster) unknown(id uint64) {
	h.t.Helper()
	_, known := h.clocks[id].Skew()
	require.False(h.t, known)
}

// gauge returns the values of a member's metric trivet_clock_skew_seconds; none if the skew is unknown.
func (h *testCluster) gauge(id uint64) (values []float64) {
	r := prometheus.NewRegistry()
	r.MustRegister(h.clocks[id])
	found, err := r.Gather()
	require.NoError(h.t, err)
	for _, f := range found {
		if f.GetName() != "trivet_clock_skew_seconds" {
			require.Equal(h.t, "etcd_network_peer_round_trip_time_seconds", f.GetName())
			require.Len(h.t, f.GetMetric(), len(h.clocks)-1)
			continue
		}
		for _, m := range f.GetMetric() {
			values = append(values, m.GetGauge().GetValue())
		}
	}
	return values
}

// TestWrongClockIsCorrectedInOneRound sets a member's wall clock wrong, and then right. Now and Skew must be correct at
// once, and the other members must not be affected.
func TestWrongClockIsCorrectedInOneRound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newTestCluster(t, 3)
		h.unknown(1)
		h.round(1, 2, 3)
		h.skew(1, 0)
		before := h.clocks[1].Steady()
		for _, ahead := range []time.Duration{10 * time.Minute, -10 * time.Minute, time.Minute, 24 * time.Hour} {
			h.ahead[1] = ahead // no round is made on member 1 meanwhile
			h.skew(1, ahead)
			require.InDelta(t, 0, time.Until(h.clocks[1].Now()).Seconds(), 0.01)
			require.InDelta(t, 0, time.Until(h.clocks[1].Steady()).Seconds(), 0.01)
			h.round(2, 3)
			h.skew(2, 0)
			h.skew(3, 0)
		}
		require.WithinDuration(t, before, h.clocks[1].Steady(), time.Second, "Steady does not follow changes of the wall clock")
		h.ahead[1] = 900 * time.Millisecond
		require.InDelta(t, 0.9, time.Until(h.clocks[1].Now()).Seconds(), 0.001, "an error below one second is not corrected")
		h.ahead[1] = 0
		h.skew(1, 0)
	})
}

// TestTwoClocksGiveNoMajority checks that Skew is unknown when two clocks differ, unless a reading of the third member
// is at most lately old.
func TestTwoClocksGiveNoMajority(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newTestCluster(t, 3)
		h.cut[3] = true
		h.round(1, 2)
		h.skew(1, 0)
		h.ahead[1] = 10 * time.Minute
		h.skew(1, 10*time.Minute)
		h.round(2)
		h.unknown(2)
		h.round(1)
		h.unknown(1)
		require.InDelta(t, 0, time.Until(h.clocks[1].Now()).Seconds(), 0.01, "Now continues with the correct time")
		h.cut[3] = false
		h.round(1, 2)
		h.skew(1, 10*time.Minute)
		h.skew(2, 0)
		h.cut[3] = true
		time.Sleep(lately / 2)
		h.round(1, 2)
		h.skew(1, 10*time.Minute)
		h.skew(2, 0)
		time.Sleep(lately/2 + time.Second)
		h.round(1, 2)
		h.unknown(1)
		h.unknown(2)
	})
}

// TestClocksSetOneAfterTheOther sets the clocks of two members one after the other, the second before a round has
// noticed the first. Now must stay correct until the next round and after it.
func TestClocksSetOneAfterTheOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newTestCluster(t, 3)
		h.round(1, 2, 3)
		h.ahead[2] = 10 * time.Minute
		h.round(1, 3)
		h.ahead[2], h.ahead[1] = 0, 10*time.Minute
		require.InDelta(t, 0, time.Until(h.clocks[1].Now()).Seconds(), 0.01)
		h.skew(1, 10*time.Minute)
		h.round(1)
		require.InDelta(t, 0, time.Until(h.clocks[1].Now()).Seconds(), 0.01)
		h.skew(1, 10*time.Minute)
	})
}

// TestSingleMemberUsesItsOwnClock checks that Now of a member without peers follows its wall clock, even when that is
// set.
func TestSingleMemberUsesItsOwnClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newTestCluster(t, 1)
		h.round(1)
		for _, ahead := range []time.Duration{10 * time.Minute, -time.Hour} {
			h.ahead[1] = ahead
			require.InDelta(t, ahead.Seconds(), time.Until(h.clocks[1].Now()).Seconds(), 0.01)
			h.unknown(1)
		}
	})
}

// TestInvalidReadingsAreIgnored checks that responses that are too slow, malformed or from a version without the
// command do not count, and that the readings of removed members are deleted.
func TestInvalidReadingsAreIgnored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newTestCluster(t, 3)
		h.old[2], h.old[3] = true, true
		h.round(1)
		h.unknown(1)
		h.old[2] = false
		h.lies[2] = []byte("noon")
		h.round(1)
		h.unknown(1)
		delete(h.lies, 2)
		h.trip = mostTrip
		h.round(1)
		h.unknown(1)
		h.trip = mostTrip/2 - time.Millisecond
		h.round(1)
		h.skew(1, 0)
		h.trip = time.Millisecond
		h.old[3] = false
		h.ahead[2], h.ahead[3] = time.Hour, time.Hour
		h.round(1)
		h.skew(1, -time.Hour)
		delete(h.clocks, 2)
		delete(h.clocks, 3)
		h.round(1)
		h.unknown(1)
		require.Empty(t, h.clocks[1].readings)
	})
}

// TestLogAndMetric checks that a skew is logged once per minute, with the action to take, and once more when it has
// ended. The metric must have the skew while it is known.
func TestLogAndMetric(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newTestCluster(t, 3)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan struct{})
		go func() { defer close(ended); h.clocks[1].Run(ctx) }()
		at := func(d time.Duration, ahead time.Duration) string {
			synctest.Wait()
			h.mu.Lock()
			h.ahead[1] = ahead
			h.mu.Unlock()
			h.logs[1].take()
			time.Sleep(d)
			synctest.Wait()
			return h.logs[1].take()
		}
		require.Empty(t, at(10*time.Second, 0))
		require.Equal(t, []float64{0}, h.gauge(1))
		log := at(5*time.Minute, 2*time.Second)
		require.Equal(t, 5, strings.Count(log, "level=WARN"), log)
		require.Contains(t, log, "this member's clock is 2s ahead of the others': set it")
		log = at(5*time.Minute, -10*time.Minute)
		require.Equal(t, 5, strings.Count(log, "level=ERROR"), log)
		require.Contains(t, log, "this member's clock is 10m0s behind the others': set it")
		require.InDeltaSlice(t, []float64{-600}, h.gauge(1), 0.01)
		log = at(5*time.Minute, 0)
		require.Equal(t, 1, strings.Count(log, "agrees with the others' again"), log)
		h.mu.Lock()
		h.cut[1] = true
		h.mu.Unlock()
		time.Sleep(lately + time.Minute)
		require.Empty(t, h.gauge(1), "the skew is unknown without recent responses")
		h.mu.Lock()
		h.cut[1], h.cut[3] = false, true
		h.mu.Unlock()
		log = at(5*time.Minute, 10*time.Minute)
		require.Equal(t, 5, strings.Count(log, "level=ERROR"), log)
		require.Contains(t, log, "the members' clocks are 10m0s apart")
		require.Empty(t, h.gauge(1), "the skew is unknown if two clocks differ")
		cancel()
		<-ended
	})
}

// TestSlowReadingDoesNotReplaceFastOne checks that a reading with a longer round trip replaces an earlier one only if
// the two contradict each other or the earlier one is older than keepFor.
func TestSlowReadingDoesNotReplaceFastOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newTestCluster(t, 3)
		h.back = 900 * time.Millisecond
		h.round(1)
		got, _ := h.clocks[1].Skew()
		require.InDelta(t, 0.45, got.Seconds(), 0.01, "the estimate is wrong by half of the round trip")
		h.back = 0
		h.round(1)
		h.skew(1, 0)
		h.back = 900 * time.Millisecond
		h.round(1)
		h.skew(1, 0)
		h.ahead[2], h.ahead[3] = time.Minute, time.Minute
		h.round(1)
		got, _ = h.clocks[1].Skew()
		require.InDelta(t, -60, got.Seconds(), 0.5)
		h.back = 0
		h.round(1)
		h.skew(1, -time.Minute)
		h.back = 900 * time.Millisecond
		time.Sleep(keepFor)
		h.round(1)
		got, _ = h.clocks[1].Skew()
		require.Greater(t, (got + time.Minute).Abs(), 100*time.Millisecond, "a reading older than keepFor is replaced by a slow one")
	})
}

// TestAnswerFormat checks that a response is the Unix time in nanoseconds, in 8 bytes, big endian.
func TestAnswerFormat(t *testing.T) {
	at := time.Date(2026, 7, 1, 12, 0, 0, 5, time.UTC)
	c := New(Options{Log: slog.New(slog.DiscardHandler), Wall: func() time.Time { return at }})
	body, err := c.Answer(t.Context(), 2, nil)
	require.NoError(t, err)
	require.Equal(t, at, time.Unix(0, int64(binary.BigEndian.Uint64(body))).UTC())
	require.Empty(t, maps.Collect(maps.All(c.readings)))
}

package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/bench/table"
)

// TestLongestGap checks the time between replies: a request without a reply, a late reply, and replies in another order
// than their requests.
func TestLongestGap(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"1  1.000 ms\n2  1.000 ms\n5  1.000 ms\n":    30 * time.Millisecond,
		"1  0.5 ms\n2  50.5 ms\n3  40.5 ms\n4 31 ms": 60 * time.Millisecond,
		"7  2.000 ms": 0,
	} {
		got, err := longestGap(text)
		require.NoError(t, err)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{"", "1 x ms", "sendto: Network is unreachable"} {
		_, err := longestGap(text)
		require.Error(t, err, text)
	}
}

// TestFiguresHaveLines checks that each figure of a move appears in a table.
func TestFiguresHaveLines(t *testing.T) {
	f := table.Figures{}
	for _, peer := range []string{"", byHand, byHandLive, byVirsh} {
		for _, k := range kinds {
			for _, size := range sizes {
				add(f, peer, k.name, size, move{total: time.Second, blackout: time.Second, paused: time.Second})
			}
		}
	}
	ids := map[string]bool{}
	for _, one := range tables() {
		for _, l := range one.Lines {
			ids[l.ID] = true
			require.Equal(t, []float64{1000}, f.Of(l.ID).Ours, l.ID)
			require.Equal(t, []float64{1000}, f.Of(l.ID).Peer, l.ID)
		}
	}
	require.Len(t, f, len(ids))
}

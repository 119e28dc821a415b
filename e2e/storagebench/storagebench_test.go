package main

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/bench/table"
)

func TestLinesAreUniqueAndOfAPart(t *testing.T) {
	seen := map[string]bool{}
	for _, table := range tables {
		for _, l := range table.Lines {
			require.True(t, slices.Contains(partNames(), l.Part), l.Part)
			require.False(t, seen[l.ID], "%s is listed twice", l.ID)
			seen[l.ID] = true
		}
	}
}

func TestCheck(t *testing.T) {
	b := &bench{parts: partNames(), rounds: 1}
	require.NoError(t, b.check())
	b.parts = []string{"disk"}
	require.ErrorContains(t, b.check(), `no part "disk"; there are io, clone, attach`)
	b = &bench{parts: partNames()}
	require.ErrorContains(t, b.check(), "one round at least")
}

func TestParseLoad(t *testing.T) {
	l, err := parseLoad("ops=300 bytes=1228800 us=1500000")
	require.NoError(t, err)
	require.Equal(t, load{operations: 300, bytes: 1_228_800, elapsed: 1500 * time.Millisecond}, l)
	for _, wrong := range []string{"", "ops=300 bytes=1228800", "ops=x bytes=1 us=1"} {
		_, err := parseLoad(wrong)
		require.ErrorContains(t, err, "diskload printed", wrong)
	}
}

// TestAttachmentsFitTheGuests checks that the volumes that are attached at once are those that the lines name.
func TestAttachmentsFitTheGuests(t *testing.T) {
	for _, size := range sizes {
		require.Equal(t, 20, size.attached)
		require.Zero(t, size.attached%hotPlugs)
	}
}

// TestBarApplies checks that a higher CPU time per operation than the bar is shown as missed.
func TestBarApplies(t *testing.T) {
	b := &bench{results: table.Figures{}}
	b.results.Ours("randread cpu", 108)
	b.results.Peer("randread cpu", 100)
	text := b.results.Text(tables, []string{"io"}, "")
	require.Contains(t, text, "by hand: QEMU's CPU per read | 108 µs | 100 µs | 1.08 × | ≤ 1.05 × | **missed** |")
	require.Contains(t, text, "| not measured |", "a target without a measurement is shown")
}

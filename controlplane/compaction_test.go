package main

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// past is the store and engine of a compactor. The test determines how much is written to it, and when.
type past struct {
	elapsed           time.Duration
	revision, written int64
	compacted         int64 // the newest revision that was compacted
	forgotten         int64
	at                map[int64]int64 // bytes written up to each revision
}

func newPast() *past { return &past{at: map[int64]int64{}} }

func (p *past) Revision() int64  { return p.revision }
func (p *past) Size() int64      { return p.written - p.forgotten }
func (p *past) SizeInUse() int64 { return 0 }
func (p *past) Written() int64   { return p.written }
func (p *past) Compact(_ context.Context, revision int64) error {
	p.compacted, p.forgotten = revision, p.at[revision]
	return nil
}

// goOn writes bytesPerSecond for the duration d, and calls compact every compactEvery.
func (p *past) goOn(t *testing.T, c *compactor, d time.Duration, bytesPerSecond int64) {
	for range d / compactEvery {
		p.elapsed += compactEvery
		p.revision += 100
		p.written += bytesPerSecond * int64(compactEvery/time.Second)
		p.at[p.revision] = p.written
		require.NoError(t, c.compact(t.Context()))
	}
}

// TestCompactionByAge writes little history. Compaction must remove what is older than historyAge, and nothing younger.
func TestCompactionByAge(t *testing.T) {
	p := newPast()
	c := &compactor{store: p, engine: p, now: func() time.Duration { return p.elapsed }}
	p.goOn(t, c, 15*time.Minute, 1000)
	require.Zero(t, p.compacted)
	p.goOn(t, c, 15*time.Minute, 1000)
	require.Equal(t, int64(9000), p.compacted)
	require.LessOrEqual(t, len(c.marks), 91)
}

// TestCompactionBySize writes much history. Compaction must remove what exceeds historyBytes, but nothing younger than
// historyLeast.
func TestCompactionBySize(t *testing.T) {
	for _, mib := range []int64{1, 5, 19, 100} {
		p := newPast()
		c := &compactor{store: p, engine: p, now: func() time.Duration { return p.elapsed }}
		for range 120 {
			p.goOn(t, c, compactEvery, mib<<20)
			most := max(historyBytes, (mib<<20)*int64(historyLeast/time.Second)) + (mib<<20)*2*int64(compactEvery/time.Second)
			require.LessOrEqual(t, p.Size(), most, "%d MiB/s", mib)
			if p.compacted > 0 {
				require.LessOrEqual(t, p.compacted, p.revision-100*int64(historyLeast/compactEvery), "revisions younger than %s must stay", historyLeast)
			}
		}
		require.Positive(t, p.compacted, "%d MiB/s", mib)
		require.GreaterOrEqual(t, p.Size(), int64(historyBytes)/2, "compaction must keep at least half of the maximum size")
		p.goOn(t, c, time.Minute, 0)
		require.LessOrEqual(t, p.Size(), int64(historyBytes)+(mib<<20)*int64(compactEvery/time.Second))
	}
}

// TestCompactionAfterASnapshot replaces the state by a snapshot. The compactor must drop the marks of the old state.
func TestCompactionAfterASnapshot(t *testing.T) {
	p := newPast()
	c := &compactor{store: p, engine: p, now: func() time.Duration { return p.elapsed }}
	p.goOn(t, c, time.Minute, 1<<20)
	p.written = 0
	p.goOn(t, c, compactEvery, 0)
	require.Len(t, c.marks, 1)
}

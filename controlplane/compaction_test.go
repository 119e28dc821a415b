package main

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// past is a store to which a test writes at a given rate.
type past struct {
	elapsed           time.Duration
	revision, written int64
	compacted         int64 // the newest revision that was compacted, and what had been written until then
	forgotten         int64
	at                map[int64]int64 // bytes written until a revision
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

// goOn writes so many bytes a second for a while, with a look at the history every compactEvery.
func (p *past) goOn(t *testing.T, c *compactor, d time.Duration, bytesPerSecond int64) {
	for range d / compactEvery {
		p.elapsed += compactEvery
		p.revision += 100
		p.written += bytesPerSecond * int64(compactEvery/time.Second)
		p.at[p.revision] = p.written
		require.NoError(t, c.compact(t.Context()))
	}
}

// While there is little history, compaction removes what is older than the maximum age.
func TestCompactionByAge(t *testing.T) {
	p := newPast()
	c := &compactor{store: p, engine: p, now: func() time.Duration { return p.elapsed }}
	p.goOn(t, c, 15*time.Minute, 1000)
	require.Zero(t, p.compacted)
	p.goOn(t, c, 15*time.Minute, 1000)
	require.Equal(t, int64(9000), p.compacted)
	require.LessOrEqual(t, len(c.marks), 91)
}

// While there is much history, compaction removes what is beyond the maximum size, but nothing younger than half a
// minute.
func TestCompactionBySize(t *testing.T) {
	for _, mib := range []int64{1, 5, 19, 100} {
		p := newPast()
		c := &compactor{store: p, engine: p, now: func() time.Duration { return p.elapsed }}
		for range 120 {
			p.goOn(t, c, compactEvery, mib<<20)
			most := max(historyBytes, (mib<<20)*int64(historyLeast/time.Second)) + (mib<<20)*2*int64(compactEvery/time.Second)
			require.LessOrEqual(t, p.Size(), most, "%d MiB/s", mib)
			if p.compacted > 0 {
				require.LessOrEqual(t, p.compacted, p.revision-100*int64(historyLeast/compactEvery), "the newest stays for %s", historyLeast)
			}
		}
		require.Positive(t, p.compacted, "%d MiB/s", mib)
		require.GreaterOrEqual(t, p.Size(), int64(historyBytes)/2, "compaction keeps at least half of the maximum size")
		p.goOn(t, c, time.Minute, 0)
		require.LessOrEqual(t, p.Size(), int64(historyBytes)+(mib<<20)*int64(compactEvery/time.Second))
	}
}

// When a snapshot replaces the state, compaction forgets the sizes that it measured of the old state.
func TestCompactionAfterASnapshot(t *testing.T) {
	p := newPast()
	c := &compactor{store: p, engine: p, now: func() time.Duration { return p.elapsed }}
	p.goOn(t, c, time.Minute, 1<<20)
	p.written = 0
	p.goOn(t, c, compactEvery, 0)
	require.Len(t, c.marks, 1)
}

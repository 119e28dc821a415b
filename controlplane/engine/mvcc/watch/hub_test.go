package watch

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// put implements Changes with the put of one key.
type put command.KV

func (put) Len() int { return 1 }

func (p put) Event(int) Event { return Event{Type: EventPut, KV: command.KV(p)} }

// noHistory is a Source that fails when it is read.
type noHistory struct{}

func (noHistory) CompactRevision() int64 { return 0 }

func (noHistory) ReadEvents(*Collector) error { return errors.New("events were read from disk") }

func (noHistory) ReadPrevious([]Event) error { return errors.New("versions were read from disk") }

// TestWatcherFarBehind checks that a watcher that is more batches behind than one read covers gets all of their events,
// in order and without waiting.
func TestWatcherFarBehind(t *testing.T) {
	h := NewHub(1, 1<<20, noHistory{})
	w := h.Watch(Options{Key: []byte("a"), MaxEvents: 1000})
	defer w.Close()
	const batches = 700
	for i := range int64(batches) {
		h.Announce(put{Key: []byte("a"), Value: fmt.Append(nil, i), ModRevision: i + 2}, i+2)
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	next := int64(2)
	for next < batches+2 {
		b, err := w.Next(ended)
		require.NoError(t, err)
		for _, e := range b.Events {
			require.Equal(t, next, e.KV.ModRevision)
			next++
		}
		require.Equal(t, next-1, b.Revision)
		require.Equal(t, b.Revision, w.Progress())
	}
	_, err := w.Next(ended)
	require.ErrorIs(t, err, context.Canceled)
}

// TestWatcherEnds checks that Next keeps returning the error with which the watcher has ended, also after Close of the
// hub.
func TestWatcherEnds(t *testing.T) {
	h := NewHub(5, 1<<20, noHistory{})
	seen := h.Watch(Options{Key: []byte("a")})
	h.Restore(3)
	_, err := seen.Next(context.Background())
	require.ErrorIs(t, err, ErrRestored, "the watcher has seen revision 5, and the restored state ends at revision 3")
	h.Close()
	_, err = seen.Next(context.Background())
	require.ErrorIs(t, err, ErrRestored)
	_, err = h.Watch(Options{Key: []byte("a")}).Next(context.Background())
	require.ErrorIs(t, err, ErrClosed)
}

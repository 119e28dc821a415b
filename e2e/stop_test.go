package e2e

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// TestStopAllAtOnce stops all three members at the same time, three times. It checks that no member logs an error or a
// failed transfer of leadership, and that no data is lost.
func TestStopAllAtOnce(t *testing.T) {
	w := newWorld(t)
	w.put("127.0.0.1", "before")
	for round := range 3 {
		from := map[int]int{}
		for id := range w.trio.Members {
			log, err := os.ReadFile(w.dir.LogFile(w.trio.Name(id)))
			require.NoError(t, err)
			from[id] = len(log)
		}
		began := time.Now()
		var stopping sync.WaitGroup
		for id := range w.trio.Members {
			stopping.Go(func() {
				if err := w.dir.Stop(w.trio.Name(id), 12*time.Second); err != nil {
					t.Error(err)
				}
			})
		}
		stopping.Wait()
		t.Logf("round %d: stopped after %s", round, time.Since(began).Round(time.Millisecond))
		for id := range w.trio.Members {
			log, err := os.ReadFile(w.dir.LogFile(w.trio.Name(id)))
			require.NoError(t, err)
			require.NotContains(t, string(log[from[id]:]), "leadership was not transferred")
			require.NotContains(t, string(log[from[id]:]), "level=ERROR")
		}
		require.NoError(t, w.trio.StartAll())
		w.ready()
		// Try repeatedly, because a member without a leader serves reads from its own state, which may be old.
		require.NoError(t, lab.Until(w.context(time.Minute), "all members have the written data", func(context.Context) error {
			if !w.has("127.0.0.1", "before") {
				return errors.New("the member does not have it")
			}
			return nil
		}))
	}
}

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// witness watches a guest during a migration. The guest prints a line on its console again and again, which QEMU writes
// to a file on the guest's host, so that the files say which host runs the guest. And the witness makes the guest write
// numbers to its disk.
type witness struct {
	g    *faultyGuest
	end  context.CancelFunc
	done sync.WaitGroup

	mu sync.Mutex
	// runs has the hosts whose guest has printed something, in the order in which that was observed. No host follows
	// itself.
	runs []int
	// acknowledged has the numbers that the guest has written and flushed. The last number that it may have written is
	// tried, and the first one of this witness is first.
	acknowledged []int
	first, tried int
}

// writeScript makes the guest write a number to its disk, in a sector of its own, because a call that was given up can
// still be executed after later ones. The script succeeds when the disk has confirmed a flush. Without conv=fsync there
// would be no flush, because sync(1) does not flush the cache of a device without a file system.
const writeScript = "printf %%08d %d | dd of=/dev/vda bs=512 seek=%[1]d conv=notrunc,fsync 2>/dev/null"

// readScript prints the numbers in a range of sectors, each with eight digits.
const readScript = "dd if=/dev/vda bs=512 skip=%d count=%d 2>/dev/null | tr -d '\\000'"

// watch makes the guest print lines and write numbers, and begins to watch it.
func (g *faultyGuest) watch() *witness {
	g.m.run("[ -e /tmp/beat ] && kill $(cat /tmp/beat) 2>/dev/null; " +
		"(while :; do echo beat; sleep 0.1; done >/dev/console 2>/dev/null </dev/null & echo $! >/tmp/beat)")
	w := &witness{g: g}
	if g.witness != nil {
		w.tried = g.witness.tried
	}
	w.first = w.tried + 1
	limit := g.c.context(time.Minute)
	for w.write(limit, g.source); len(w.acknowledged) == 0; w.write(limit, g.source) {
		require.NoError(g.c.t, limit.Err(), "the guest cannot write its disk")
	}
	ctx, cancel := context.WithCancel(g.c.t.Context())
	w.end = cancel
	w.done.Go(func() { w.watchConsoles(ctx) })
	w.done.Go(func() {
		for host := g.source; ctx.Err() == nil; host = 1 - host {
			w.write(ctx, host)
		}
	})
	return w
}

// write makes the guest write the next number, through the network of a host.
func (w *witness) write(ctx context.Context, host int) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	w.tried++
	m := *w.g.m
	m.host = host
	if _, err := lab.RunInGuest(ctx, m.namespace(), m.nic.Address.Addr().String(), fmt.Sprintf(writeScript, w.tried)); err == nil {
		w.acknowledged = append(w.acknowledged, w.tried)
	}
	select { // At most ten writes a second.
	case <-time.After(100 * time.Millisecond):
	case <-ctx.Done():
	}
}

// watchConsoles observes on which host the guest prints, every 20 ms.
func (w *witness) watchConsoles(ctx context.Context) {
	size := func(host int) int64 {
		s, err := os.Stat(filepath.Join(w.g.home(host), "console.log"))
		if err != nil {
			return 0
		}
		return s.Size()
	}
	last := [2]int64{size(0), size(1)}
	for ctx.Err() == nil {
		// The former host of the guest is observed last, so that its last line is not observed after the first line of
		// the new host.
		for _, host := range []int{w.g.source, w.g.target} {
			now := size(host)
			w.mu.Lock()
			if now > last[host] && (len(w.runs) == 0 || w.runs[len(w.runs)-1] != host) {
				w.runs = append(w.runs, host)
			}
			w.mu.Unlock()
			last[host] = now
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// stop ends the witness. It may be called more than once.
func (w *witness) stop() {
	w.end()
	w.done.Wait()
}

// check requires that the guest, which is now on the host node, never ran on two hosts, and that its disk has all
// numbers that it has acknowledged.
func (w *witness) check(node int) {
	t := w.g.c.t
	w.g.await("the guest prints on its host", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return len(w.runs) > 0 && w.runs[len(w.runs)-1] == node
	})
	w.stop()
	want := []int{w.g.source}
	if node == w.g.target {
		want = append(want, w.g.target)
	}
	require.Equal(t, want, w.runs, "the hosts on which the guest ran, in this order; it moved from %d to %d", w.g.source, w.g.target)
	digits := w.g.m.run(fmt.Sprintf(readScript, w.first, w.tried-w.first+1))
	have := map[int]bool{}
	for ; len(digits) >= 8; digits = digits[8:] {
		n, err := strconv.Atoi(digits[:8])
		require.NoError(t, err)
		have[n] = true
	}
	for _, n := range w.acknowledged {
		require.True(t, have[n], "the disk has lost the acknowledged write %d of %d to %d", n, w.first, w.tried)
	}
	t.Logf("%d of %d writes were acknowledged, and all of these are on the disk", len(w.acknowledged), w.tried-w.first+1)
}

// number64 returns the number in a JSON object at the path of keys, or 0.
func number64(text []byte, keys ...string) uint64 {
	for _, key := range keys {
		var object map[string]json.RawMessage
		if json.Unmarshal(text, &object) != nil {
			return 0
		}
		text = object[key]
	}
	n, _ := strconv.ParseUint(string(text), 10, 64)
	return n
}

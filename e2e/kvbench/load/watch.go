package load

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Watchers is a set of etcd watches. Goroutines read their events and measure the delay of each.
type Watchers struct {
	cancel  context.CancelFunc
	streams []clientv3.Watcher
	reading sync.WaitGroup

	mu     sync.Mutex
	delays []time.Duration // guarded by mu
	first  error           // guarded by mu
}

// StartWatchers creates perStream watches on each of several gRPC streams, and returns when the servers have confirmed
// all of them. The watch with the number i, from 0 over all streams, watches key(i). Events are measured only if their
// value was made by Stamp.
func StartWatchers(ctx context.Context, clients []*clientv3.Client, streams, perStream int, key func(i int) string) (*Watchers, error) {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	w := &Watchers{cancel: cancel}
	begun := make(chan error, streams*perStream)
	for s := range streams {
		watcher := clientv3.NewWatcher(clients[s%len(clients)])
		w.streams = append(w.streams, watcher)
		for i := range perStream {
			events := watcher.Watch(ctx, key(s*perStream+i), clientv3.WithCreatedNotify())
			w.reading.Go(func() { w.read(events, begun) })
		}
	}
	for range streams * perStream {
		if err := <-begun; err != nil {
			return nil, errors.Join(fmt.Errorf("begin a watch: %w", err), w.Close())
		}
	}
	return w, nil
}

func (w *Watchers) read(events clientv3.WatchChan, begun chan<- error) {
	created := false
	for r := range events {
		if !created {
			created = true
			begun <- r.Err()
		}
		now := time.Now()
		w.mu.Lock()
		if err := r.Err(); err != nil && w.first == nil && !errors.Is(err, context.Canceled) {
			w.first = err
		}
		for _, e := range r.Events {
			if sent, ok := sentAt(e.Kv.Value); ok {
				w.delays = append(w.delays, now.Sub(sent))
			}
		}
		w.mu.Unlock()
	}
	if !created {
		begun <- errors.New("the stream ended")
	}
}

// Await waits until at least n events with a value made by Stamp have arrived in total, and returns their delays. A
// delay is measured from the time that the value contains to the arrival of the event.
func (w *Watchers) Await(ctx context.Context, n int) ([]time.Duration, error) {
	for {
		w.mu.Lock()
		delays, err := w.delays, w.first
		w.mu.Unlock()
		if err != nil {
			return nil, fmt.Errorf("watch: %w", err)
		}
		if len(delays) >= n {
			return delays, nil
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return nil, fmt.Errorf("%d of %d events came: %w", len(delays), n, ctx.Err())
		}
	}
}

// Close cancels the watches and waits until the goroutines that read their events have ended.
func (w *Watchers) Close() error {
	w.cancel()
	var errs []error
	for _, s := range w.streams {
		if err := s.Close(); err != nil && !errors.Is(err, context.Canceled) {
			errs = append(errs, err)
		}
	}
	w.reading.Wait()
	return errors.Join(errs...)
}

// Stamp returns a value of at least n bytes that contains the time sent, at which a put was sent. Watchers computes the
// delay of an event from it.
func Stamp(sent time.Time, n int) string {
	text := strconv.FormatInt(sent.UnixNano(), 10) + " "
	for len(text) < n {
		text += "."
	}
	return text
}

func sentAt(value []byte) (time.Time, bool) {
	for i, b := range value {
		if b == ' ' {
			ns, err := strconv.ParseInt(string(value[:i]), 10, 64)
			return time.Unix(0, ns), err == nil
		}
	}
	return time.Time{}, false
}

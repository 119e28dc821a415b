package load

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Answer is the result of one request: the time when it was due, the time when it had succeeded or failed, and its
// error.
type Answer struct {
	Due, Done time.Time
	Err       error
}

// Took returns the request's latency: the time from when it was due until it had succeeded or failed.
func (a Answer) Took() time.Duration { return a.Done.Sub(a.Due) }

// Answers holds the results of the requests of a run.
type Answers []Answer

// Latencies returns the latencies of the successful requests.
func (all Answers) Latencies() (took []time.Duration) {
	for _, a := range all {
		if a.Err == nil {
			took = append(took, a.Took())
		}
	}
	return took
}

// Failed returns the number of failed requests, and the error of the first failed one in the order of the results. The
// error is nil if none failed.
func (all Answers) Failed() (n int, first error) {
	for _, a := range all {
		if a.Err != nil {
			if n == 0 {
				first = a.Err
			}
			n++
		}
	}
	return n, first
}

// Within returns the results of the requests that were due in the period that begins at the time from (inclusive) and
// ends at the time until (exclusive).
func (all Answers) Within(from, until time.Time) (some Answers) {
	for _, a := range all {
		if !a.Due.Before(from) && a.Due.Before(until) {
			some = append(some, a)
		}
	}
	return some
}

// LongestGap returns the longest time in which no request succeeded, in the period that begins at the time from and
// ends at the time until.
func (all Answers) LongestGap(from, until time.Time) time.Duration {
	moments := []time.Time{from, until}
	for _, a := range all {
		if a.Err == nil && a.Done.After(from) && a.Done.Before(until) {
			moments = append(moments, a.Done)
		}
	}
	slices.SortFunc(moments, time.Time.Compare)
	var longest time.Duration
	for i := 1; i < len(moments); i++ {
		longest = max(longest, moments[i].Sub(moments[i-1]))
	}
	return longest
}

// Closed makes n requests in a closed loop: each of the concurrent callers sends its next request when its last one has
// ended. For each request, it calls ask with the number of the caller and the number of the request, both counted from
// 0. An error of ask becomes part of the results. Closed itself returns an error only if ctx ends.
func Closed(ctx context.Context, callers, n int, ask func(ctx context.Context, caller, i int) error) (Answers, error) {
	all := make(Answers, n)
	var next atomic.Int64
	var asking sync.WaitGroup
	for caller := range callers {
		asking.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				due := time.Now()
				err := ask(ctx, caller, i)
				all[i] = Answer{Due: due, Done: time.Now(), Err: err}
			}
		})
	}
	asking.Wait()
	return all, ctx.Err()
}

// For makes requests in a closed loop, as Closed does, but for the duration length instead of a number of requests.
// Each caller makes at least one request. For waits for the requests that are in flight at the end, so ask must set a
// deadline for its request. An error of ask becomes part of the results. For itself returns an error only if ctx ends.
// The results are not in order of time.
func For(ctx context.Context, callers int, length time.Duration, ask func(ctx context.Context, caller int) error) (Answers, error) {
	each := make([]Answers, callers)
	until := time.Now().Add(length)
	var asking sync.WaitGroup
	for caller := range callers {
		asking.Go(func() {
			for due := time.Now(); ctx.Err() == nil && (len(each[caller]) == 0 || due.Before(until)); due = time.Now() {
				err := ask(ctx, caller)
				each[caller] = append(each[caller], Answer{Due: due, Done: time.Now(), Err: err})
			}
		})
	}
	asking.Wait()
	return slices.Concat(each...), ctx.Err()
}

// mostOpen is the maximum number of concurrent requests of an Open. If one more is due, the Open stops with an error.
const mostOpen = 10_000

// Open makes requests in an open loop, that is, at a fixed rate regardless of the responses, until Stop is called.
type Open struct {
	cancel context.CancelFunc
	done   chan struct{}
	all    Answers
	err    error
}

// StartOpen starts to make rate requests per second and returns at once. It calls ask for each request with the number
// of the request, from 0. ask must set a deadline for its request, because Stop waits for all requests.
func StartOpen(ctx context.Context, rate float64, ask func(ctx context.Context, i int) error) *Open {
	stopping, cancel := context.WithCancel(ctx)
	o := &Open{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(o.done)
		o.run(ctx, stopping, rate, ask)
	}()
	return o
}

func (o *Open) run(ctx, stopping context.Context, rate float64, ask func(ctx context.Context, i int) error) {
	var asking sync.WaitGroup
	var mu sync.Mutex
	open := make(chan struct{}, mostOpen)
	began := time.Now()
	for i := 0; ; i++ {
		due := began.Add(time.Duration(float64(i) / rate * float64(time.Second)))
		select {
		case <-time.After(time.Until(due)):
		case <-stopping.Done():
			asking.Wait()
			return
		}
		select {
		case open <- struct{}{}:
		default:
			o.err = errors.New("too many requests wait for their answers")
			asking.Wait()
			return
		}
		asking.Go(func() {
			err := ask(ctx, i)
			done := time.Now()
			<-open
			mu.Lock()
			defer mu.Unlock()
			o.all = append(o.all, Answer{Due: due, Done: done, Err: err})
		})
	}
}

// Stop ends the loop, waits for the requests in flight, and returns the results of all requests. It returns an error if
// there were too many requests in flight at any time.
func (o *Open) Stop() (Answers, error) {
	o.cancel()
	<-o.done
	return o.all, o.err
}

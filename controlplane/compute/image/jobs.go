package image

import (
	"context"
	"sync"
	"time"
)

// backgroundJobs runs a member's imports and pulls in goroutines while Run is active. At most one job of each name runs
// at a time, and the total number of running jobs is limited. A failed job starts again only after a pause.
type backgroundJobs struct {
	wake func()
	warn func(name string, err error)

	mu      sync.Mutex
	ctx     context.Context // nil while Run is not active
	busy    map[string]bool
	failed  map[string]failure
	running sync.WaitGroup
}

// failure counts the consecutive failures of a job. The field until is the time before which the job does not start
// again.
type failure struct {
	times int
	until time.Time
}

const (
	minBackoff = 5 * time.Second
	maxBackoff = 5 * time.Minute
)

func newBackgroundJobs(wake func(), warn func(string, error)) *backgroundJobs {
	return &backgroundJobs{wake: wake, warn: warn, busy: map[string]bool{}, failed: map[string]failure{}}
}

// open sets the context of the jobs. Jobs can be started only between the calls of open and close.
func (e *backgroundJobs) open(ctx context.Context) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ctx = ctx
}

// close prevents further jobs from starting and waits for the running ones. The caller must cancel the context given to
// open before.
func (e *backgroundJobs) close() {
	e.mu.Lock()
	e.ctx = nil
	e.mu.Unlock()
	e.running.Wait()
}

// start runs f in a goroutine and returns true. It returns false, without running f, in these cases: a job of this name
// is running or paused after a failure, the semaphore slots is full, or Run is not active. When f ends, start calls
// e.wake, because another job may now use the slot.
func (e *backgroundJobs) start(name string, slots chan struct{}, f func(context.Context) error) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ctx == nil || e.ctx.Err() != nil || e.busy[name] || time.Now().Before(e.failed[name].until) {
		return false
	}
	select {
	case slots <- struct{}{}:
	default:
		return false
	}
	e.busy[name] = true
	ctx := e.ctx
	e.running.Go(func() {
		err := f(ctx)
		if err != nil && ctx.Err() == nil {
			e.warn(name, err)
		}
		e.mu.Lock()
		delete(e.busy, name)
		e.recordResult(name, err, time.Now())
		e.mu.Unlock()
		<-slots
		e.wake()
	})
	return true
}

// recordResult stores the result of a job. A failure is stored with the time at which the job may start again, and a
// success deletes the failures of the job. After a failure, it also deletes the failures of other jobs whose pause
// ended more than 2*maxBackoff ago.
func (e *backgroundJobs) recordResult(name string, err error, now time.Time) {
	if err == nil {
		delete(e.failed, name)
		return
	}
	f := e.failed[name]
	f.times++
	f.until = now.Add(min(minBackoff<<min(f.times-1, 16), maxBackoff))
	e.failed[name] = f
	for other, f := range e.failed {
		if now.Sub(f.until) > 2*maxBackoff {
			delete(e.failed, other)
		}
	}
}

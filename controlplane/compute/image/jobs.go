package image

import (
	"context"
	"sync"
	"time"
)

// backgroundJobs runs a member's imports and pulls in goroutines while Run is active. Each named job runs once at a
// time, a limited number of jobs run at a time, and a failed job starts again only after a pause.
type backgroundJobs struct {
	wake func()
	warn func(name string, err error)

	mu      sync.Mutex
	ctx     context.Context // nil while Run is not active
	busy    map[string]bool
	failed  map[string]failure
	running sync.WaitGroup
}

// failure counts the consecutive failures of a job. The job does not start again before the time until.
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

// open sets the context for jobs. start starts jobs only between open and close.
func (e *backgroundJobs) open(ctx context.Context) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ctx = ctx
}

// close prevents further jobs from starting and waits for running ones. Their context must have ended.
func (e *backgroundJobs) close() {
	e.mu.Lock()
	e.ctx = nil
	e.mu.Unlock()
	e.running.Wait()
}

// start runs f in a goroutine and returns true. It returns false, without running f, if a job of this name is running
// or paused after a failure, if slots is full, or if Run is not active. When f ends, wake is called, because another
// job may now use the slot.
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

// recordResult stores whether a job succeeded, with the pause after a failure, and deletes failures of jobs whose pause
// ended long ago.
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

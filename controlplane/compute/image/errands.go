package image

import (
	"context"
	"sync"
	"time"
)

// errands are what a member does in the background while Run runs: each thing once at a time, so many at a time, and
// what failed not again at once. Run owns them: it waits for each.
type errands struct {
	wake func()
	warn func(name string, err error)

	mu      sync.Mutex
	ctx     context.Context // nil while Run does not run
	busy    map[string]bool
	failed  map[string]failure
	running sync.WaitGroup
}

// failure is how often in a row an errand failed, and until when it rests.
type failure struct {
	times int
	until time.Time
}

const (
	firstRest = 5 * time.Second
	lastRest  = 5 * time.Minute
)

func newErrands(wake func(), warn func(string, error)) *errands {
	return &errands{wake: wake, warn: warn, busy: map[string]bool{}, failed: map[string]failure{}}
}

// open lets errands begin, until close.
func (e *errands) open(ctx context.Context) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ctx = ctx
}

// close lets none begin any more and waits for those that run; their context has ended.
func (e *errands) close() {
	e.mu.Lock()
	e.ctx = nil
	e.mu.Unlock()
	e.running.Wait()
}

// begin runs f, unless the same errand runs or rests, or all slots are taken. Run is woken when it has ended: that is
// when what found no slot may have one.
func (e *errands) begin(name string, slots chan struct{}, f func(context.Context) error) bool {
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
		e.note(name, err, time.Now())
		e.mu.Unlock()
		<-slots
		e.wake()
	})
	return true
}

// note remembers a failure, and forgets those that are long over.
func (e *errands) note(name string, err error, now time.Time) {
	if err == nil {
		delete(e.failed, name)
		return
	}
	f := e.failed[name]
	f.times++
	f.until = now.Add(min(firstRest<<min(f.times-1, 16), lastRest))
	e.failed[name] = f
	for other, f := range e.failed {
		if now.Sub(f.until) > 2*lastRest {
			delete(e.failed, other)
		}
	}
}

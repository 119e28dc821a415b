package leader

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"
)

// ErrTermOver is the cancellation cause of a context of InTerm or While when this member no longer leads in the
// context's term.
var ErrTermOver = errors.New("this member no longer leads in the term")

// InTerm returns a context that ends when the member with the ID self no longer leads in the given term. Its cause is
// then ErrTermOver. The caller must call stop, which cancels the context and waits for the goroutine that watches the
// leadership.
func InTerm(ctx context.Context, l Leadership, self, term uint64) (inTerm context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			changed := l.Changed()
			if leader, now := l.Leader(); leader != self || now != term {
				cancel(ErrTermOver)
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, func() {
		cancel(nil)
		<-done
	}
}

// While calls f in each term in which the member with the ID self leads. The context of f ends with the term. If f
// returns before the end of its term, While calls f again at once. To avoid a busy loop, f must therefore wait before
// it returns after a failure. While returns when ctx has ended and f has returned.
func While(ctx context.Context, l Leadership, self uint64, f func(ctx context.Context, term uint64)) {
	for ctx.Err() == nil {
		changed := l.Changed()
		if leader, term := l.Leader(); leader == self {
			inTerm, stop := InTerm(ctx, l, self, term)
			f(inTerm, term)
			stop()
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// Task is work that the leader repeats at an interval.
type Task struct {
	Name string
	// Every is the interval between the starts of two runs. If Run takes longer, the next run follows at once.
	Every time.Duration
	// Run does the work once. Its error is only logged; the next run follows as usual.
	Run func(context.Context) error
}

// Tasks runs each Task of List while this member leads. All fields are required.
type Tasks struct {
	Self       uint64
	Leadership Leadership
	// Ready returns once this member has applied every write that was acknowledged before the call. In each term, tasks
	// start only after Ready has returned nil.
	Ready func(context.Context) error
	Log   *slog.Logger
	List  []Task
}

// Run runs the tasks in every term in which this member leads. It returns when ctx has ended and every task has
// returned.
func (t *Tasks) Run(ctx context.Context) { While(ctx, t.Leadership, t.Self, t.lead) }

// lead runs every task until ctx ends with the term, and returns when all tasks have returned.
func (t *Tasks) lead(ctx context.Context, term uint64) {
	if err := t.Ready(ctx); err != nil {
		t.Log.Warn("leader is not ready", "term", term, "err", err)
		return
	}
	t.Log.Info("leading", "term", term)
	var running sync.WaitGroup
	for _, task := range t.List {
		running.Go(func() { t.repeat(ctx, task) })
	}
	<-ctx.Done()
	running.Wait()
	t.Log.Info("no longer leading", "term", term)
}

// repeat runs a task every task.Every until ctx ends.
func (t *Tasks) repeat(ctx context.Context, task Task) {
	tick := time.NewTicker(task.Every)
	defer tick.Stop()
	for {
		if err := task.Run(ctx); err != nil && ctx.Err() == nil {
			t.Log.Warn("task failed", "task", task.Name, "err", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

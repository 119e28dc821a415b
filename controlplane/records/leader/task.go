package leader

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Task is a loop of the leader.
type Task struct {
	Name string
	// Every is the pause between runs. A run that fails is logged and comes again.
	Every time.Duration
	Run   func(context.Context) error
}

// Tasks runs tasks while this member leads.
type Tasks struct {
	Self       uint64
	Leadership Leadership
	// Ready returns when the records are as new as the leadership; required.
	Ready func(context.Context) error
	Log   *slog.Logger
	List  []Task
}

// Run returns when ctx ends, after every task has.
func (t *Tasks) Run(ctx context.Context) {
	for ctx.Err() == nil {
		changed := t.Leadership.Changed()
		if leader, term := t.Leadership.Leader(); leader == t.Self {
			t.reign(ctx, term, changed)
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// reign runs every task until the leadership changes.
func (t *Tasks) reign(ctx context.Context, term uint64, changed <-chan struct{}) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		defer cancel()
		for {
			select {
			case <-ctx.Done():
				return
			case <-changed:
			}
			changed = t.Leadership.Changed()
			if leader, now := t.Leadership.Leader(); leader != t.Self || now != term {
				return
			}
		}
	})
	if err := t.Ready(ctx); err != nil {
		t.Log.Warn("leader is not ready", "term", term, "err", err)
		cancel()
		return
	}
	t.Log.Info("leading", "term", term)
	for _, task := range t.List {
		wg.Go(func() { t.loop(ctx, task) })
	}
	<-ctx.Done()
	t.Log.Info("no longer leading", "term", term)
}

func (t *Tasks) loop(ctx context.Context, task Task) {
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

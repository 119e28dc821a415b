package consensus

import (
	"fmt"
	"sync"
)

// threads are the goroutines of a Runner beside raft's own: one writes the log of all groups, and each group has one for
// its state machine. They get work by value and give it back through the Runner's inbox.
type threads struct {
	runner  *Runner
	writing *write // that the log's goroutine has
	writes  chan *write
	jobs    map[*Group]chan []*job
	wg      sync.WaitGroup
}

func startThreads(r *Runner) *threads {
	t := &threads{runner: r, writes: make(chan *write, 1), jobs: map[*Group]chan []*job{}}
	engine := r.host.engine
	t.wg.Go(func() {
		for w := range t.writes {
			err := w.run(engine)
			_ = r.call(func() { r.host.finishWrite(w, err) }, true) // a runner that stops does not need it
		}
	})
	for _, g := range r.host.groups {
		jobs := make(chan []*job, 1)
		t.jobs[g] = jobs
		t.wg.Go(func() {
			for js := range jobs {
				err := runJobs(js)
				_ = r.call(func() { g.finishJobs(js, err) }, true) // as above
			}
		})
	}
	return t
}

// stop waits for the goroutines to do what they have.
func (t *threads) stop() {
	close(t.writes)
	for _, jobs := range t.jobs {
		close(jobs)
	}
	t.wg.Wait()
}

// runJobs does jobs, and answers those who wait from here.
func runJobs(js []*job) error {
	reply := func(ask callback, r Result, err error) { ask(r, err) }
	for i, j := range js {
		j.reply = reply
		if err := j.run(); err != nil {
			for _, j := range js[i:] {
				j.abandon(reply, fmt.Errorf("%w: %w", ErrUncertain, err))
			}
			return err
		}
	}
	return nil
}

// advance gives the goroutines that have nothing to do what waits for them.
func (t *threads) advance(h *Host) (moved bool, err error) {
	for t.writing == nil {
		w := h.due()
		if w == nil {
			break
		}
		if w.batch == nil {
			moved = true
			if err := h.finish(w); err != nil {
				return false, err
			}
			continue
		}
		t.writing = w
		t.writes <- w
	}
	for _, g := range h.groups {
		if len(g.jobs) > 0 && !g.working {
			g.working = true
			t.jobs[g] <- g.jobs
			g.jobs = nil
		}
	}
	return moved, h.engine.Err()
}

// finishWrite takes note of a write that has ended.
func (h *Host) finishWrite(w *write, failure error) {
	if h.err != nil {
		return
	}
	var err error // that it stops is seen by Err
	defer h.guard(&err)
	h.threads.writing = nil
	if failure == nil {
		failure = h.finish(w)
	}
	if failure != nil {
		_ = h.fail(failure)
		return
	}
	for i, g := range h.groups {
		if i == 0 || len(g.queue)+len(g.mail) > 0 {
			h.schedule(g) // what has waited meanwhile goes on
		}
	}
}

// finishJobs takes note of jobs that have ended.
func (g *Group) finishJobs(js []*job, failure error) {
	h := g.host
	if h.err != nil {
		return
	}
	var err error // as above
	defer h.guard(&err)
	g.working = false
	for _, j := range js {
		if failure == nil {
			failure = j.then()
		}
	}
	if failure != nil {
		_ = h.fail(fmt.Errorf("group %d: %w", g.id, failure))
		return
	}
	h.schedule(g)
}

// writing says that the log's goroutine has been at work since less than a tick.
func (h *Host) writing() bool {
	return h.threads != nil && h.threads.writing != nil && h.threads.writing.since == h.now
}

// stalled says for how many ticks the log has not come to an end with a write.
func (h *Host) stalled() uint64 {
	if h.threads == nil || h.threads.writing == nil {
		return 0
	}
	return h.now - h.threads.writing.since
}

// fleeStall hands the leadership of all groups to others while the log does not come to an end with a write: they can
// commit without it, and answer.
func (h *Host) fleeStall() {
	ticks := h.stalled()
	if ticks < uint64(h.opts.StallTicks) {
		h.fled = false
		return
	}
	for _, g := range h.groups {
		if g.leader != h.opts.ID || g.transfer != nil || g.furthest() == 0 {
			continue
		}
		if !h.fled {
			h.fled = true
			h.opts.Log.Warn("the disk does not finish a write: handing the leadership over", "ticks", ticks)
		}
		g.TransferLeader(0, func(err error) {
			if err != nil {
				g.log.Warn("the leadership stays with a disk that does not finish a write", "err", err)
			}
		})
	}
}

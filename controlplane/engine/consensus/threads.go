package consensus

import (
	"fmt"
	"sync"
)

// threads holds the goroutines of a Runner besides the Host's. One of them writes the log of all groups, and one per
// group runs the state machine. They receive work through channels and return the results through the Runner's inbox.
type threads struct {
	runner  *Runner
	writing *write // the write that the log's goroutine is executing, if any
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
			_ = r.call(func() { r.host.finishWrite(w, err) }, true) // fails only when the runner is stopping
		}
	})
	for _, g := range r.host.groups {
		jobs := make(chan []*job, 1)
		t.jobs[g] = jobs
		t.wg.Go(func() {
			for js := range jobs {
				err := runJobs(js)
				_ = r.call(func() { g.finishJobs(js, err) }, true) // fails only when the runner is stopping
			}
		})
	}
	return t
}

// stop waits until the goroutines have finished the work that they have received.
func (t *threads) stop() {
	close(t.writes)
	for _, jobs := range t.jobs {
		close(jobs)
	}
	t.wg.Wait()
}

// runJobs runs jobs and calls the callbacks of their proposals on this goroutine. After an error, the callbacks of the
// remaining jobs get ErrUncertain.
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

// advance passes the collected write and the groups' jobs to those goroutines that are idle. moved reports that it
// finished writes that had nothing to store, so that raft may have more to do.
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

// finishWrite executes the actions that waited for a write, or stops the host if the write failed.
func (h *Host) finishWrite(w *write, failure error) {
	if h.err != nil {
		return
	}
	var err error // not returned: the Runner checks Host.Err
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
		if i == 0 || len(g.queue)+len(g.forwardQueue) > 0 {
			h.schedule(g) // Process may have left the group's proposals queued during the write
		}
	}
}

// finishJobs handles the results of a group's jobs on the Host's goroutine, or stops the host if one failed.
func (g *Group) finishJobs(js []*job, failure error) {
	h := g.host
	if h.err != nil {
		return
	}
	var err error // not returned: the Runner checks Host.Err
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

// writing reports whether a write of the log is under way that was started in the current tick.
func (h *Host) writing() bool {
	return h.threads != nil && h.threads.writing != nil && h.threads.writing.since == h.now
}

// stalled returns for how many ticks the current write of the log has been running, 0 if there is none.
func (h *Host) stalled() uint64 {
	if h.threads == nil || h.threads.writing == nil {
		return 0
	}
	return h.now - h.threads.writing.since
}

// transferOnStall transfers the leadership of all groups when a write of the log takes Options.StallTicks or more. The
// other members can commit without this disk.
func (h *Host) transferOnStall() {
	ticks := h.stalled()
	if ticks < uint64(h.opts.StallTicks) {
		h.stallReported = false
		return
	}
	for _, g := range h.groups {
		if g.leader != h.opts.ID || g.transfer != nil || g.mostCurrentVoter() == 0 {
			continue
		}
		if !h.stallReported {
			h.stallReported = true
			h.opts.Log.Warn("the disk does not finish a write: transferring leadership", "ticks", ticks)
		}
		g.TransferLeader(0, func(err error) {
			if err != nil {
				g.log.Warn("leadership stays on a member whose disk does not finish a write", "err", err)
			}
		})
	}
}

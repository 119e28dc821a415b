package consensus

import (
	"fmt"
	"sync"
)

// threads holds the goroutines of a Runner other than the Host's goroutine. One goroutine writes the log of all groups.
// In addition, one goroutine per group runs the state machine. They receive work through channels and return the
// results through the Runner's inbox.
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

// stop lets the goroutines finish the work that they have already received, and waits until they have ended.
func (t *threads) stop() {
	close(t.writes)
	for _, jobs := range t.jobs {
		close(jobs)
	}
	t.wg.Wait()
}

// runJobs runs the jobs of a group on the goroutine of its state machine, and calls the callbacks of the applied
// proposals there. After an error, the callbacks of the failed job and of the later jobs get ErrUncertain.
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

// advance passes the next write to the log's goroutine, and each group's jobs to the goroutine of its state machine, if
// these goroutines are idle. A write that has nothing to store is finished at once. In this case moved is true, because
// raft may have more to do.
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

// finishWrite is called on the Host's goroutine when a write of the log has ended. It executes the actions that waited
// for the write. If the write failed, it stops the host.
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

// finishJobs is called on the Host's goroutine when jobs of a group have ended. It handles their results. If a job
// failed, it stops the host.
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

// writing reports whether a write of the log is running that was started in the current tick. It is false for a write
// that takes longer than a tick.
func (h *Host) writing() bool {
	return h.threads != nil && h.threads.writing != nil && h.threads.writing.since == h.now
}

// stalled returns the number of ticks for which the current write of the log has been running. It returns 0 if no write
// is running.
func (h *Host) stalled() uint64 {
	if h.threads == nil || h.threads.writing == nil {
		return 0
	}
	return h.now - h.threads.writing.since
}

// transferOnStall transfers the leadership of all groups that this member leads when a write of the log has been
// running for Options.StallTicks or longer. The other members can then commit entries without this member's disk.
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

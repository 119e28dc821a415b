package qemu

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// endCopies thaws the guest, cancels all jobs of CopyDisks, and removes their block nodes and descriptors from QEMU. If
// the guest is not frozen and there are no copies, endCopies changes nothing.
func (p *Process) endCopies(ctx context.Context) error {
	return errors.Join(p.thaw(ctx, p.thawWithin), p.removeCopies(ctx))
}

// removeCopies cancels all copies, and removes their block nodes and descriptors.
func (p *Process) removeCopies(ctx context.Context) error {
	changes := newJobWait()
	for {
		jobs, err := p.copyJobs(ctx, changes)
		if err != nil {
			return err
		}
		if len(jobs) == 0 {
			break
		}
		ended := true
		for _, j := range jobs {
			command := "job-dismiss"
			if j.Status != "concluded" {
				command, ended = "job-cancel", false
			}
			err := p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
				return conn.Do(ctx, command, object{"id": j.ID}, nil)
			})
			var refusal *qmp.Error // QEMU refuses if the job is ending or is cancelled already.
			if err != nil && !errors.As(err, &refusal) {
				return err
			}
			ended = ended && err == nil
		}
		if ended { // QEMU has removed a job when it answers job-dismiss.
			break
		}
		if changes.wait(ctx); ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return p.call(ctx, p.work, deleteCopyNodes)
}

// cancelCopy cancels the copy job of a disk, if there is one: QEMU cannot close the disk while the job runs. The
// CopyDisks call that began the job returns an error.
func (p *Process) cancelCopy(ctx context.Context, d Disk) error {
	jobs, err := p.copyJobs(ctx, newJobWait())
	if err != nil || !slices.ContainsFunc(jobs, func(j job) bool { return j.ID == d.copyNode() && j.Status != "concluded" }) {
		return err
	}
	err = p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		return conn.Do(ctx, "job-cancel", object{"id": d.copyNode()}, nil)
	})
	var refusal *qmp.Error // QEMU refuses if the copy has just ended.
	if errors.As(err, &refusal) {
		return nil
	}
	return err
}

// deleteCopyNodes removes the block nodes and the descriptor sets of all copies from QEMU.
func deleteCopyNodes(ctx context.Context, conn *qmp.Conn) error {
	nodes, err := queryNodes(ctx, conn)
	if err != nil {
		return err
	}
	for _, files := range []bool{false, true} { // QEMU deletes a file node only after its format node.
		for _, name := range nodes {
			if strings.HasPrefix(name, copyPrefix) && strings.HasSuffix(name, "-file") == files {
				if err := deleteNode(ctx, conn, name); err != nil {
					return err
				}
			}
		}
	}
	all, err := queryFDSets(ctx, conn)
	if err != nil {
		return err
	}
	for _, s := range all {
		if len(s.FDs) > 0 && strings.HasPrefix(s.FDs[0].Opaque, copyPrefix) {
			if err := conn.Do(ctx, "remove-fd", object{"fdset-id": s.Set}, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// endHold resumes a guest that hold has stopped, possibly in an earlier process of the agent. Only hold and a migration
// stop a running guest. A guest that a migration has stopped is not resumed (see migratingName). Otherwise, a guest in
// QEMU's state paused, which is not the state after a disk error, was stopped by hold.
func (p *Process) endHold(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelWithin)
	defer cancel()
	s, err := p.Status(ctx)
	if migrating, unknown := p.home.migrating(); migrating || unknown != nil {
		return nil // A migration has stopped the guest.
	}
	if err == nil && s.State == "paused" {
		err = p.Resume(ctx)
	}
	if err != nil {
		p.leaveCopies()
	}
	return err
}

// resumeAfterCopy resumes a guest that QEMU has paused because it could not copy what the guest was about to
// overwrite.
func (p *Process) resumeAfterCopy(ctx context.Context) {
	if s, err := p.Status(ctx); err == nil && s.State == "io-error" {
		_ = p.Resume(ctx) // After an error, the guest is resumed later like after any disk error.
	}
}

// leaveCopies makes endEarlierCopies end what is left of copies.
func (p *Process) leaveCopies() {
	select {
	case p.copiesLeft <- struct{}{}:
	default:
	}
}

// leftPause is the time between two attempts of endEarlierCopies. Other copies can begin meanwhile.
const leftPause = 5 * time.Second

// endEarlierCopies ends the copies that an earlier process of the agent has begun, or that CopyDisks could not end. It
// also resumes and thaws the guest. After an error, it tries again after leftPause. It waits for the next such copies
// until p is closed.
func (p *Process) endEarlierCopies() {
	for p.life.Err() == nil {
		select {
		case <-p.copiesLeft:
		case <-p.life.Done():
			return
		}
		p.copies.Lock()
		p.copying.Store(true)
		err := errors.Join(p.endHold(p.life), p.removeCopies(p.life), p.thaw(p.life, thawAttempt))
		p.copying.Store(false)
		p.copies.Unlock()
		if err != nil {
			pause(p.life, leftPause)
			p.leaveCopies()
		}
	}
}

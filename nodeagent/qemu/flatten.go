package qemu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// Flattening is the state of copying the base image of a disk into the disk's own file.
type Flattening struct {
	// Running means that QEMU is copying the base image. Offset is the position of the copy in the disk, in bytes, and
	// Percent is the copied part.
	Running bool
	Offset  uint64
	Percent uint32
	// Copied means that QEMU has copied the whole base image and no longer reads it. The record still names the base
	// image until FlattenDisk is called.
	Copied bool
	// Waiting means that QEMU copies disks of the VM (see CopyDisks), or that the end of such a copy is not complete.
	// FlattenDisk does not begin or complete anything meanwhile.
	Waiting bool
	// Stalled means that the copy makes no progress. This package does not set or read Stalled: the caller of Disks may
	// set it, and should then call CancelFlatten.
	Stalled bool
}

// streamJob is a QEMU job that copies a base image (block-stream). QEMU removes the job when the job ends.
type streamJob struct {
	ID      string `json:"id"`
	Current uint64 `json:"current-progress"`
	Total   uint64 `json:"total-progress"`
}

func queryJobs(ctx context.Context, conn *qmp.Conn) (all []streamJob, err error) {
	err = conn.Do(ctx, "query-jobs", nil, &all)
	return all, err
}

// flatteningOf returns the state of flattening a disk. The parameter depth is the number of backing images of the
// disk's file in QEMU.
func flatteningOf(d Disk, jobs []streamJob, depth int) (f Flattening) {
	if d.Base == "" {
		return f
	}
	at := slices.IndexFunc(jobs, func(j streamJob) bool { return j.ID == d.flattenJob() })
	if at >= 0 {
		f.Running, f.Offset = true, jobs[at].Current
		if jobs[at].Total > 0 {
			f.Percent = uint32(float64(jobs[at].Current) / float64(jobs[at].Total) * 100)
		}
		return f
	}
	f.Copied = depth == 0
	return f
}

// flattenJob returns the id of QEMU's job that copies the base image of the disk.
func (d Disk) flattenJob() string { return d.node() + "-flatten" }

// overlayNode returns the name of the block node of the disk's own file. If the disk has I/O limits, the throttle node
// is above this node.
func (d Disk) overlayNode() string {
	if d.limited() {
		return d.formatNode()
	}
	return d.node()
}

// errFlattenBesideRBD is the error of FlattenDisk for a VM that also has a disk with an RBD image: the progress of the
// copy is unknown, because Disks does not query the QEMU of such a VM.
var errFlattenBesideRBD = errors.New("the image is not copied while the VM has an RBD volume: detach that volume, or stop the VM")

// FlattenDisk takes the next step to make a disk of the running guest independent of its base image. If QEMU has not
// begun to copy the base image, FlattenDisk starts the copy and returns. If QEMU has copied the whole base image,
// FlattenDisk calls record. If record returns nil, FlattenDisk makes QEMU close the base image, and removes the base
// image from the record. If the last copy failed, FlattenDisk returns the error of the copy once, and the next call
// starts the copy again. While QEMU is copying, FlattenDisk does nothing. The error wraps [ErrCopying]
// if CopyDisks is in progress.
//
// QEMU's job (block-stream) copies while the guest reads and writes. If QEMU ends before the job, the disk's file
// contains a part of the base image. No data is lost, because QEMU is started with the base image until record has
// returned nil.
//
// QEMU removes the job at its end (auto-dismiss), because QEMU 7.2 crashes in query-named-block-nodes while a completed
// block-stream job exists. FlattenDisk therefore does not use the job's state: the copy is complete when the disk's
// file has no backing image in QEMU.
func (p *Process) FlattenDisk(ctx context.Context, id string, record func(Disk) error) error {
	if err := p.flattenDisk(ctx, id, record); err != nil {
		return fmt.Errorf("flatten disk %s: %w", id, err)
	}
	return nil
}

func (p *Process) flattenDisk(ctx context.Context, id string, record func(Disk) error) error {
	if !p.copies.TryLock() {
		return ErrCopying
	}
	defer p.copies.Unlock()
	disks, err := p.Disks(ctx)
	if err != nil {
		return err
	}
	at := slices.IndexFunc(disks, func(d AttachedDisk) bool { return d.ID == id })
	if at < 0 || disks[at].Base == "" {
		return nil
	}
	d := disks[at]
	if hasRBD(p.Record().Spec.Disks) {
		return errFlattenBesideRBD
	}
	if d.Flattening.Running {
		return nil
	}
	if !d.Flattening.Copied {
		if failure := p.takeFlattenError(d.flattenJob()); failure != "" {
			return errors.New("QEMU could not copy the image: " + failure)
		}
		return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
			return conn.Do(ctx, "block-stream", object{"job-id": d.flattenJob(), "device": d.overlayNode()}, nil)
		})
	}
	if err := p.flush(ctx, d.overlayNode()); err != nil {
		return err
	}
	if err := record(d.Disk); err != nil {
		return err
	}
	if err := p.deleteBase(ctx, d.Disk); err != nil {
		return err
	}
	all := slices.Clone(p.Record().Spec.Disks)
	at = slices.IndexFunc(all, func(o Disk) bool { return o.ID == id })
	all[at].Base = ""
	return p.writeDisks(all)
}

// recordFlattenError decodes a BLOCK_JOB_COMPLETED event. If the job has failed, recordFlattenError stores its error
// for the next FlattenDisk. If the agent misses the event, FlattenDisk starts the job again, and the error occurs again
// if its cause persists.
func (p *Process) recordFlattenError(e qmp.Event) {
	var data struct {
		Job   string `json:"device"`
		Error string `json:"error"`
	}
	if err := e.Decode(&data); err != nil || data.Error == "" {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.flattenErrors == nil {
		p.flattenErrors = map[string]string{}
	}
	p.flattenErrors[data.Job] = printable(data.Error, 200)
}

// takeFlattenError removes and returns the stored error of a job. It returns "" if there is none.
func (p *Process) takeFlattenError(job string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	failure := p.flattenErrors[job]
	delete(p.flattenErrors, job)
	return failure
}

// flush makes QEMU write its caches of a node to the disk. QMP has no command for this, so flush uses a command of the
// human monitor. QEMU does not report every error of the flush, so the parameter record of FlattenDisk must check that
// the file is complete.
func (p *Process) flush(ctx context.Context, node string) error {
	var text string
	err := p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		return conn.Do(ctx, "human-monitor-command", object{"command-line": "qemu-io " + node + " flush"}, &text)
	})
	if err == nil && strings.TrimSpace(text) != "" {
		err = errors.New("QEMU could not write its caches: " + printable(text, 200))
	}
	return err
}

// deleteBase makes QEMU close the base image of a disk. No other node may use the base image any more.
func (p *Process) deleteBase(ctx context.Context, d Disk) error {
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		for _, name := range []string{d.baseNode(), d.baseFile()} {
			if err := deleteNode(ctx, conn, name); err != nil {
				return err
			}
		}
		return removeFDSets(ctx, conn, d.baseNode())
	})
}

// CancelFlatten cancels QEMU's copy of a disk's base image, if there is one, and waits until the copy has ended. The
// copied part stays in the disk's file, and the next FlattenDisk copies only the rest.
func (p *Process) CancelFlatten(ctx context.Context, id string) error {
	disks := p.Record().Spec.Disks
	at := slices.IndexFunc(disks, func(d Disk) bool { return d.ID == id })
	if at < 0 || disks[at].Base == "" {
		return nil
	}
	err := p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		return cancelJob(ctx, conn, disks[at].flattenJob())
	})
	if err != nil {
		return fmt.Errorf("end flattening of disk %s: %w", id, err)
	}
	return nil
}

// cancelJob cancels a job, and waits until it has ended.
func cancelJob(ctx context.Context, conn *qmp.Conn, id string) error {
	changes := newJobWait()
	for cancelled := false; ; {
		changes.begin(conn)
		jobs, err := queryJobs(ctx, conn)
		if err != nil || !slices.ContainsFunc(jobs, func(j streamJob) bool { return j.ID == id }) {
			return err
		}
		if !cancelled {
			cancelled = true
			var refusal *qmp.Error
			// QEMU refuses to cancel a job that is about to end.
			if err := conn.Do(ctx, "job-cancel", object{"id": id}, nil); err != nil && !errors.As(err, &refusal) {
				return err
			}
		}
		if changes.wait(ctx); ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

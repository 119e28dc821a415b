package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// cancelWithin is the maximum time to end the copies of a failed or cancelled CopyDisks.
	cancelWithin = time.Minute
	// copyPrefix begins the names of the jobs, block nodes and descriptors of copies.
	copyPrefix = "copy-"
)

var (
	// ErrCopying means that another CopyDisks of the process is in progress, or the end of one, or a step of
	// FlattenDisk.
	ErrCopying = errors.New("other disks of the VM are being copied")

	// ErrDisksChanged means that a disk was attached, detached or flattened after the caller had made the files for the
	// copies. Nothing was begun.
	ErrDisksChanged = errors.New("the disks of the VM have changed")

	// ErrNotHeld means that CopyDisks must stop the guest's CPUs, but that they do not run already, for example after a
	// disk error. Nothing was begun.
	ErrNotHeld = errors.New("the guest is not running")
)

// CopyTarget is a disk to copy, and the file that receives the copy.
type CopyTarget struct {
	Disk string // id of the disk
	Size uint64 // the disk's size in bytes
	// Take is set if the storage of the disk, for example a Ceph cluster, makes the snapshot. Take makes this snapshot.
	// QEMU then does not copy the disk, and the fields below are not used.
	Take func(ctx context.Context) error
	File *os.File // an empty QCOW2 image of the disk's size, open for reading and writing
	// Key is the key of File if File is an encrypted image (see [Launcher.Format]). It is required if the disk is
	// encrypted, because QEMU copies the decrypted content.
	Key Key
	// Base means that File receives only the differences from the disk's base image. It must be true if the disk has a
	// base image, and false otherwise.
	Base bool
}

// errPlainCopy is the error of CopyDisks if a disk is encrypted and the file for its copy is not. QEMU would write the
// decrypted content to that file.
var errPlainCopy = errors.New("the disk is encrypted, and the file for its copy is not")

// CopyResult describes a complete copy.
type CopyResult struct {
	// Taken is the instant of the content: each copy has the content that its disk had at Taken. If there is only one
	// disk, and it has a function Take, its copy has the content of an instant during CopyDisks, up to takeWithin
	// before Taken.
	Taken time.Time
	// Frozen is true if the guest agent (qemu-ga) had frozen the guest's file systems at Taken.
	Frozen bool
}

// CopyDisks copies disks of the running guest as they are at one instant, soon after the call. The guest continues to
// run: before QEMU lets the guest overwrite a part of a disk that is not copied yet, QEMU copies the old content of
// that part. The copy of a disk with a base image contains only the differences from the base image. If the guest agent
// (qemu-ga) answers, it freezes the guest's file systems until QEMU has begun the copies. If there are several disks,
// and at least one of them has a function Take, QEMU stops the guest's CPUs while it begins the copies and until all
// functions Take have returned. The functions have takeWithin for this. CopyDisks first ends the copying of the disks'
// base images, which FlattenDisk continues afterwards.
//
// CopyDisks returns when all copies are complete, or after the first error. By then QEMU has closed the files, and the
// caller must sync them. The error wraps [ErrCopying], [ErrDisksChanged] or [ErrNotHeld] if no copy was begun. If a
// copy fails while the guest writes, QEMU may pause the guest. CopyDisks then resumes the guest.
func (p *Process) CopyDisks(ctx context.Context, targets []CopyTarget) (CopyResult, error) {
	if !p.copies.TryLock() {
		return CopyResult{}, ErrCopying
	}
	defer p.copies.Unlock()
	p.copying.Store(true)
	defer p.copying.Store(false)
	out, err := p.copyDisks(ctx, targets)
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelWithin)
	defer cancel()
	if cleanErr := p.endCopies(late); cleanErr != nil {
		p.leaveCopies()
		if err == nil {
			err = cleanErr
		}
	}
	if err != nil {
		p.resumeAfterCopy(late)
		return CopyResult{}, fmt.Errorf("copy disks: %w", err)
	}
	return out, nil
}

func (p *Process) copyDisks(ctx context.Context, targets []CopyTarget) (out CopyResult, err error) {
	if err := p.endCopies(ctx); err != nil { // copies that an earlier agent began
		return out, err
	}
	for _, t := range targets { // QEMU begins no copy of a disk whose base image it copies
		if err := p.CancelFlatten(ctx, t.Disk); err != nil {
			return out, err
		}
	}
	disks, actions, err := p.prepareCopies(ctx, targets)
	if err != nil {
		return out, err
	}
	if out.Frozen, err = p.freeze(ctx); err != nil {
		return out, err
	}
	out.Taken, err = p.beginAll(ctx, disks, actions, targets)
	if thawErr := p.thaw(ctx, p.thawWithin); err == nil {
		err = thawErr
	}
	if err != nil || len(actions) == 0 {
		return out, err
	}
	return out, p.waitCopies(ctx, len(actions))
}

// takeWithin is the maximum time for all functions CopyTarget.Take of one call of CopyDisks. The guest's CPUs may be
// stopped in this time.
const takeWithin = 20 * time.Second

// beginAll makes QEMU begin the copies of disks with these actions, and calls the functions Take of targets
// concurrently. If there are several targets, and one of them has a Take, the guest's CPUs are stopped meanwhile, so
// that all copies have the content of the same instant. beginAll returns the time at which the last Take has returned.
func (p *Process) beginAll(ctx context.Context, disks []Disk, actions []object, targets []CopyTarget) (taken time.Time, err error) {
	if len(targets) > len(actions) && len(targets) > 1 && !mutant.On(mutant.TakeWithoutHold) {
		if err := p.hold(ctx); err != nil {
			return taken, err
		}
		defer func() {
			if endErr := p.endHold(ctx); endErr != nil && err == nil {
				err = endErr
			}
		}()
	}
	if len(actions) > 0 {
		if err := p.beginBackups(ctx, disks, actions); err != nil {
			return taken, err
		}
	}
	bounded, cancel := context.WithTimeout(ctx, takeWithin)
	defer cancel()
	group, bounded := errgroup.WithContext(bounded)
	for _, t := range targets {
		if t.Take != nil {
			group.Go(func() error { return t.Take(bounded) })
		}
	}
	err = group.Wait()
	return time.Now(), err
}

// hold stops the guest's CPUs and completes all requests to disks, until endHold. The error wraps ErrNotHeld if the
// CPUs do not run.
func (p *Process) hold(ctx context.Context) error {
	s, err := p.Status(ctx)
	if err != nil {
		return err
	}
	if !s.Running {
		return fmt.Errorf("%w: its state in QEMU is %s", ErrNotHeld, s.State)
	}
	return p.Pause(ctx)
}

// beginBackups makes QEMU begin the copies of disks at one instant.
func (p *Process) beginBackups(ctx context.Context, disks []Disk, actions []object) (err error) {
	if mutant.On(mutant.CopyDisksInTurn) {
		for i := range actions {
			err = errors.Join(err, p.beginCopies(ctx, disks[i:i+1], actions[i:i+1]))
			pause(ctx, time.Second)
		}
		return err
	}
	return p.beginCopies(ctx, disks, actions)
}

// beginCopies makes QEMU begin the copies of disks, at one instant. Since prepareCopies the guest had time to freeze
// its file systems. If a disk was detached meanwhile, another disk can have its name in QEMU, so beginCopies checks
// that the record still has the disks.
func (p *Process) beginCopies(ctx context.Context, disks []Disk, actions []object) error {
	p.layout.Lock() // PlugDisk writes the record before it adds a disk to QEMU
	defer p.layout.Unlock()
	for _, d := range disks {
		if !slices.ContainsFunc(p.Record().Spec.Disks, d.sameFile) {
			return fmt.Errorf("disk %s: %w", d.ID, ErrDisksChanged)
		}
	}
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		properties := object{"completion-mode": "grouped"}
		return conn.Do(ctx, "transaction", object{"actions": actions, "properties": properties}, nil)
	})
}

// sameFile reports whether o has the same files as d and the same names in QEMU.
func (d Disk) sameFile(o Disk) bool {
	return d.ID == o.ID && d.node() == o.node() && d.Volume == o.Volume && d.Generation == o.Generation && d.Base == o.Base
}

// prepareCopies passes the files of targets to QEMU. It returns the disks that QEMU copies, and the actions for a
// transaction that begins the copies.
func (p *Process) prepareCopies(ctx context.Context, targets []CopyTarget) (disks []Disk, actions []object, err error) {
	all := p.Record().Spec.Disks
	for _, t := range targets {
		at := slices.IndexFunc(all, func(d Disk) bool { return d.ID == t.Disk })
		if at < 0 {
			return nil, nil, fmt.Errorf("%w: the VM has no disk %s", ErrDisksChanged, t.Disk)
		}
		if t.Take != nil {
			continue
		}
		if t.Base != (all[at].Base != "") {
			return nil, nil, fmt.Errorf("%w: disk %s was just made independent of its base image", ErrDisksChanged, t.Disk)
		}
		if err := p.raiseFileLimit(t.Size); err != nil {
			return nil, nil, err
		}
		err := p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
			return p.addCopyNodes(ctx, conn, all[at], t)
		})
		if err != nil {
			return nil, nil, fmt.Errorf("disk %s: %w", t.Disk, err)
		}
		disks, actions = append(disks, all[at]), append(actions, all[at].backupAction())
	}
	return disks, actions, nil
}

// copyNode returns the name for a copy of the disk. The copy's block node, job and descriptor set all have this name.
func (d Disk) copyNode() string { return copyPrefix + d.node() }

// addCopyNodes adds the block nodes of a copy of the disk d to QEMU.
func (p *Process) addCopyNodes(ctx context.Context, conn *qmp.Conn, d Disk, t CopyTarget) (err error) {
	if d.Encrypted && len(t.Key) == 0 && !mutant.On(mutant.CopyDecrypted) {
		return errPlainCopy
	}
	set, err := p.newFDSets(ctx, conn, 1)
	if err != nil {
		return err
	}
	if _, err := conn.AddFD(ctx, set, d.copyNode(), t.File); err != nil {
		return err
	}
	file := object{"driver": "file", "node-name": d.copyNode() + "-file", "filename": fdsetPath(set), "discard": "unmap"}
	if err := conn.Do(ctx, "blockdev-add", file, nil); err != nil {
		return err
	}
	// The base image is the backing node of the copy. Where the disk has zeros and the base image has data, QEMU
	// therefore writes zeros to the copy.
	format := object{"driver": "qcow2", "node-name": d.copyNode(), "file": d.copyNode() + "-file", "backing": nil,
		"discard": "unmap", "detect-zeroes": "unmap"}
	if d.Base != "" {
		format["backing"] = d.baseNode()
	}
	if len(t.Key) > 0 {
		secret := d.copyNode() + "-key"
		if err := addSecret(ctx, conn, secret, "raw", t.Key); err != nil {
			return err
		}
		// QEMU needs the secret only while it opens the file.
		defer func() { err = errors.Join(err, deleteObject(ctx, conn, secret)) }()
		format["encrypt"] = object{"format": "luks", "key-secret": secret}
	}
	return conn.Do(ctx, "blockdev-add", format, nil)
}

// backupAction returns the action of a transaction that begins to copy the disk. If the disk has I/O limits, the copy
// reads from the node beneath the throttle node, so that the copy does not count against the guest's limits.
func (d Disk) backupAction() object {
	source, sync := d.node(), "full"
	if d.limited() {
		source = d.formatNode()
	}
	if d.Base != "" {
		sync = "top"
	}
	return object{"type": "blockdev-backup", "data": object{"job-id": d.copyNode(), "device": source, "target": d.copyNode(),
		"sync": sync, "auto-dismiss": false, "on-source-error": "report", "on-target-error": "report"}}
}

// job is a background job of QEMU.
type job struct {
	ID     string `json:"id"`
	Status string `json:"status"`
	Error  string `json:"error"`
}

// copyJobs returns QEMU's jobs that copy disks for CopyDisks. Before the query, it calls changes.begin.
func (p *Process) copyJobs(ctx context.Context, changes *jobWait) (jobs []job, err error) {
	err = p.call(ctx, p.inspect, func(ctx context.Context, conn *qmp.Conn) error {
		changes.begin(conn)
		return conn.Do(ctx, "query-jobs", nil, &jobs)
	})
	return slices.DeleteFunc(jobs, func(j job) bool { return !strings.HasPrefix(j.ID, copyPrefix) }), err
}

// waitCopies waits until all jobs of copyJobs have ended, and returns nil if none failed. If a job fails, waitCopies
// returns the error of this job at once. The parameter count is the expected number of jobs.
func (p *Process) waitCopies(ctx context.Context, count int) error {
	changes := newJobWait()
	for {
		jobs, err := p.copyJobs(ctx, changes)
		if err != nil {
			return err
		}
		if len(jobs) != count {
			return errors.New("QEMU no longer has the job of a disk copy")
		}
		var failed error
		ended := true
		for _, j := range jobs {
			ended = ended && j.Status == "concluded"
			// After the first failure of a job, QEMU ends the other jobs of the transaction with "Operation canceled".
			if j.Error != "" && (failed == nil || strings.Contains(failed.Error(), "ancel")) {
				failed = errors.New(j.Error)
			}
		}
		if ended || failed != nil {
			return failed
		}
		if changes.wait(ctx); ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

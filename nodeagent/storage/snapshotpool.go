package storage

import (
	"context"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

// snapshotPool is the part of a storage pool that makes and deletes snapshots. fileSnapshots and rbdSnapshots implement
// it.
type snapshotPool interface {
	// Shared reports whether other hosts use the pool too.
	Shared() bool
	Snapshot(ctx context.Context, ref volume.SnapshotRef) (volume.Snapshot, error)
	FailSnapshot(ctx context.Context, ref volume.SnapshotRef, reason string) error
	DeleteSnapshot(ctx context.Context, ref volume.SnapshotRef) error
	// begin records that a snapshot of the volume of m is being made.
	begin(ctx context.Context, m copyMember) (snapshotCopy, error)
}

// snapshotCopy is a snapshot in progress. fileCopy and rbdCopy implement it.
type snapshotCopy interface {
	// Attached reports whether a process has the volume open.
	Attached() bool
	// target returns the target with which the VM that has the volume open makes the snapshot. id is the ID of the
	// volume.
	target(id string) volume.CopyTarget
	// copyDetached copies the content of a volume that no process has open.
	copyDetached(ctx context.Context) error
	Finish(ctx context.Context, taken time.Time, consistency string) error
	Fail(ctx context.Context, reason string) error
	Abandon(ctx context.Context) error
}

// snapshotPool returns the pool of an assigned volume.
func (s *Storage) snapshotPool(want *agentv1.AssignedVolume) (snapshotPool, error) {
	p, err := s.poolOf(want)
	if err != nil {
		return nil, err
	}
	return snapshotsIn(p), nil
}

// snapshotsIn returns the snapshotPool of a pool.
func snapshotsIn(p pool) snapshotPool {
	if rbd, ok := p.(*volume.RBDPool); ok {
		return rbdSnapshots{rbd}
	}
	return fileSnapshots{p.(filePool).Pool}
}

// fileSnapshots are the snapshots of volumes in a directory of the host.
type fileSnapshots struct{ *volume.Pool }

func (p fileSnapshots) Snapshot(_ context.Context, ref volume.SnapshotRef) (volume.Snapshot, error) {
	return p.Pool.Snapshot(ref)
}

func (p fileSnapshots) begin(ctx context.Context, m copyMember) (snapshotCopy, error) {
	c, err := p.BeginSnapshot(ctx, m.ref, m.want.GetEncryptionKey())
	if err != nil {
		return nil, err
	}
	return fileCopy{c}, nil
}

type fileCopy struct{ *volume.SnapshotCopy }

func (c fileCopy) target(id string) volume.CopyTarget {
	return volume.CopyTarget{Volume: id, File: c.Target(), Key: c.Key(), Size: c.Size(), Image: c.HasImage()}
}

func (c fileCopy) copyDetached(ctx context.Context) error { return c.Copy(ctx) }

// rbdSnapshots are the snapshots of volumes in a pool of a Ceph cluster.
type rbdSnapshots struct{ *volume.RBDPool }

func (rbdSnapshots) Shared() bool { return true }

func (p rbdSnapshots) begin(ctx context.Context, m copyMember) (snapshotCopy, error) {
	ctx, cancel := context.WithTimeout(ctx, rbdSnapshotWithin)
	defer cancel()
	a := volume.Attachment{VM: m.want.GetVmId(), Generation: m.want.GetAttachmentGeneration()}
	c, err := p.BeginSnapshot(ctx, m.ref, a)
	if err != nil {
		return nil, err
	}
	return rbdCopy{c}, nil
}

type rbdCopy struct{ *volume.RBDSnapshot }

// rbdSnapshotWithin is the maximum time of each of the methods begin, copyDetached and Finish for an RBD volume. Each
// of them makes a few calls to the Ceph cluster. Without a limit, such a call can wait forever, because librbd waits
// for the client that has the image open, which may be a QEMU that hangs.
const rbdSnapshotWithin = time.Minute

func (c rbdCopy) target(id string) volume.CopyTarget {
	return volume.CopyTarget{Volume: id, Size: c.Size(), Take: c.Take}
}

func (c rbdCopy) Finish(ctx context.Context, taken time.Time, consistency string) error {
	ctx, cancel := context.WithTimeout(ctx, rbdSnapshotWithin)
	defer cancel()
	return c.RBDSnapshot.Finish(ctx, taken, consistency)
}

func (c rbdCopy) copyDetached(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, rbdSnapshotWithin)
	defer cancel()
	if err := c.Take(ctx); err != nil {
		return err
	}
	return c.CheckOpened(ctx)
}

package volume

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// rbdSnapshot is a snapshot in the record of an RBD volume.
type rbdSnapshot struct {
	ID string `json:"id"`
	// Name is the name of the RBD snapshot. It begins with [snapshotPrefix] of ID and ends with a random id: a host that
	// was cut off during an earlier attempt, and continues now, cannot take a snapshot of the same name.
	Name string `json:"name"`
	Snapshot
}

// snapshots is the prefix of the names of all RBD snapshots that this package takes of volumes.
const snapshots = "snapshot-"

// snapshotPrefix returns the prefix of the names of the RBD snapshots that are taken for the snapshot with this ID.
func snapshotPrefix(id string) string { return snapshots + id + "-" }

// snapshot returns the snapshot with this ID in the record, or nil.
func (r *record) snapshot(id string) *rbdSnapshot {
	at := slices.IndexFunc(r.Snapshots, func(s rbdSnapshot) bool { return s.ID == id })
	if at < 0 {
		return nil
	}
	return &r.Snapshots[at]
}

// Snapshot returns the record of a snapshot. The error wraps [ErrNoSnapshot] if there is none. If the RBD snapshot of a
// complete snapshot is missing, the error wraps [ErrRefused].
func (p *RBDPool) Snapshot(ctx context.Context, ref SnapshotRef) (Snapshot, error) {
	s, err := p.existingSnapshot(ctx, ref)
	if err != nil {
		return Snapshot{}, fmt.Errorf("read snapshot %s: %w", ref.ID, err)
	}
	return s.Snapshot, nil
}

func (p *RBDPool) existingSnapshot(ctx context.Context, ref SnapshotRef) (rbdSnapshot, error) {
	r, _, err := p.read(ctx, ref.Volume)
	if err != nil {
		return rbdSnapshot{}, err
	}
	s := r.snapshot(ref.ID)
	if s == nil {
		return rbdSnapshot{}, ErrNoSnapshot
	}
	if s.State != Complete {
		return *s, nil
	}
	i, err := p.image(ctx, ref.Volume)
	if err != nil {
		return rbdSnapshot{}, err
	}
	if !slices.ContainsFunc(i.GetSnapshots(), func(have *rbdv1.Snapshot) bool { return have.GetName() == s.Name }) {
		return rbdSnapshot{}, fmt.Errorf("%w: the RBD snapshot %s is missing from the Ceph pool %s", ErrRefused, s.Name, p.o.Pool)
	}
	return *s, nil
}

// RBDSnapshot is a snapshot of an RBD volume in progress. The caller calls Take, and then ends the snapshot with Finish,
// Fail or Abandon. If the program ends earlier, the record of the snapshot keeps the state Copying.
type RBDSnapshot struct {
	pool     *RBDPool
	ref      SnapshotRef
	name     string // of the RBD snapshot
	size     uint64
	attached bool
	// begunAttached and generation describe the volume when the snapshot was begun: whether a VM had it open, and the
	// generation of its last attachment.
	begunAttached bool
	generation    uint64
}

// BeginSnapshot records that a snapshot of a volume is being made. The attachment a is the present one of the volume, as
// this host knows it, with an empty VM if the volume is detached. The error wraps [ErrStale] if the volume was opened
// for a later attachment, [ErrInUse] if the volume was detached and its content is not complete yet, and [ErrRefused] if
// the snapshot has a record already.
func (p *RBDPool) BeginSnapshot(ctx context.Context, ref SnapshotRef, a Attachment) (*RBDSnapshot, error) {
	s := &RBDSnapshot{pool: p, ref: ref, name: snapshotPrefix(ref.ID) + uuid.NewString()}
	err := ref.check()
	if err == nil {
		err = p.change(ctx, func() error { return s.begin(ctx, a) })
	}
	if err != nil {
		return nil, fmt.Errorf("snapshot volume %s: %w", ref.Volume, err)
	}
	return s, nil
}

func (s *RBDSnapshot) begin(ctx context.Context, a Attachment) error {
	r, text, err := s.pool.read(ctx, s.ref.Volume)
	switch {
	case err != nil:
		return err
	case r.State != ready:
		return ErrNotFound
	case a.Generation < r.Attachment.Generation && !mutant.On(mutant.StaleSnapshot):
		return fmt.Errorf("%w: generation %d is older than %d, which VM %s has", ErrStale, a.Generation, r.Attachment.Generation, r.Attachment.VM)
	case r.snapshot(s.ref.ID) != nil:
		return fmt.Errorf("%w: the snapshot exists", ErrRefused)
	}
	s.size, s.generation = r.Size, r.Attachment.Generation
	s.attached = r.Flushed < r.Attachment.Generation
	s.begunAttached = s.attached
	if s.attached && r.Attachment.VM != a.VM {
		return fmt.Errorf("%w: the content of attachment %d is not complete yet", ErrInUse, r.Attachment.Generation)
	}
	r.Snapshots = append(r.Snapshots, rbdSnapshot{
		ID: s.ref.ID, Name: s.name, Snapshot: Snapshot{State: Copying, Size: r.Size, Format: qcow2.Raw},
	})
	_, err = s.pool.write(ctx, s.ref.Volume, text, r)
	return err
}

// Attached reports whether a VM has the volume open, or has opened it before Take returned. A VM that has the volume
// open may write to it during Take: the snapshot then has the content of some instant during Take, with all writes that
// the guest flushed before.
func (s *RBDSnapshot) Attached() bool { return s.attached }

// Size returns the size of the volume in bytes, as the guest sees it.
func (s *RBDSnapshot) Size() uint64 { return s.size }

// Take takes the snapshot. If a QEMU has the volume open, librbd in that QEMU takes it, after the writes that QEMU has
// sent before.
func (s *RBDSnapshot) Take(ctx context.Context) error {
	if err := s.create(ctx, false); err != nil {
		return fmt.Errorf("snapshot volume %s: %w", s.ref.Volume, err)
	}
	return nil
}

func (s *RBDSnapshot) create(ctx context.Context, protect bool) error {
	request := &rbdv1.CreateSnapshotRequest{Name: s.pool.snapshotName(s.ref.Volume, s.name), Protect: protect}
	_, err := s.pool.o.Client.CreateSnapshot(ctx, request)
	return rbdError(err)
}

// snapshotName returns the name of an RBD snapshot of a volume's image.
func (p *RBDPool) snapshotName(id, snapshot string) *rbdv1.SnapshotName {
	return &rbdv1.SnapshotName{Image: p.name(p.imageOf(id)), Snapshot: snapshot}
}

// Finish protects the RBD snapshot, so that volumes can be cloned from it, and records the snapshot as Complete. The
// parameter taken is the instant of the content. The parameter consistency is stored as Snapshot.Consistency. The error
// wraps [ErrRefused] if another host has recorded the snapshot as failed, or has deleted its record, and [ErrStale] if
// the VM that had the volume open at BeginSnapshot has lost it to a later attachment: the snapshot may then have what
// another VM wrote. In both cases Finish removes the RBD snapshot.
func (s *RBDSnapshot) Finish(ctx context.Context, taken time.Time, consistency string) error {
	err := s.create(ctx, true)
	if err == nil {
		err = s.pool.change(ctx, func() error { return s.recordComplete(ctx, taken, consistency) })
	}
	if err != nil {
		return fmt.Errorf("finish snapshot %s: %w", s.ref.ID, err)
	}
	return nil
}

func (s *RBDSnapshot) recordComplete(ctx context.Context, taken time.Time, consistency string) error {
	r, text, err := s.pool.read(ctx, s.ref.Volume)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	have := r.snapshot(s.ref.ID)
	var refusal error
	switch {
	case err != nil || have == nil || have.Name != s.name || have.State != Copying && !mutant.On(mutant.FinishFailed):
		refusal = fmt.Errorf("%w: the snapshot was recorded as failed, or deleted, while it was taken", ErrRefused)
	case s.begunAttached && r.Attachment.Generation != s.generation && !mutant.On(mutant.StaleFinish):
		refusal = fmt.Errorf("%w: generation %d began while the snapshot of generation %d was taken", ErrStale, r.Attachment.Generation, s.generation)
	}
	if refusal != nil {
		_, err := s.pool.o.Client.RemoveSnapshot(ctx, &rbdv1.RemoveSnapshotRequest{Name: s.pool.snapshotName(s.ref.Volume, s.name)})
		return errors.Join(refusal, rbdError(err))
	}
	have.State, have.TakenAt, have.Consistency, have.Error = Complete, taken.UnixMilli(), consistency, ""
	_, err = s.pool.write(ctx, s.ref.Volume, text, r)
	return err
}

// CheckOpened makes Attached return true if a VM has opened the volume since BeginSnapshot. The caller calls it after
// Take, for a volume that no VM had open at BeginSnapshot.
func (s *RBDSnapshot) CheckOpened(ctx context.Context) error {
	r, _, err := s.pool.read(ctx, s.ref.Volume)
	if err != nil {
		return fmt.Errorf("snapshot volume %s: %w", s.ref.Volume, err)
	}
	s.attached = s.attached || r.Attachment.Generation != s.generation || r.Flushed < r.Attachment.Generation
	return nil
}

// Fail records the snapshot as Failed with the reason, and removes the RBD snapshot.
func (s *RBDSnapshot) Fail(ctx context.Context, reason string) error {
	return s.pool.FailSnapshot(ctx, s.ref, reason)
}

// Abandon removes the RBD snapshot and its record, so that the snapshot can be begun again.
func (s *RBDSnapshot) Abandon(ctx context.Context) error { return s.pool.DeleteSnapshot(ctx, s.ref) }

// FailSnapshot records that a snapshot has failed, with the reason, and removes its RBD snapshot. A complete snapshot is
// not changed.
func (p *RBDPool) FailSnapshot(ctx context.Context, ref SnapshotRef, reason string) error {
	if err := ref.check(); err != nil {
		return fmt.Errorf("end snapshot %s: %w", ref.ID, err)
	}
	return p.changeRecord(ctx, "end snapshot "+ref.ID+" of", ref.Volume, func(r record, text []byte) error {
		s := r.snapshot(ref.ID)
		switch {
		case s == nil:
			r.Snapshots = append(r.Snapshots, rbdSnapshot{ID: ref.ID})
			s = r.snapshot(ref.ID)
		case s.State == Complete || s.State == Failed:
			return nil
		}
		// The record is written first. A host that is still taking the snapshot then removes the RBD snapshot at Finish.
		s.Snapshot = Snapshot{State: Failed, Error: reason, Size: r.Size, Format: qcow2.Raw}
		if _, err := p.write(ctx, ref.Volume, text, r); err != nil {
			return err
		}
		return p.removeSnapshots(ctx, ref.Volume, snapshotPrefix(ref.ID))
	})
}

// DeleteSnapshot removes a snapshot. A missing snapshot is no error. The error wraps [ErrInUse] while a volume that was
// made from the snapshot shares content with it (see [RBDPool.Flatten]).
func (p *RBDPool) DeleteSnapshot(ctx context.Context, ref SnapshotRef) error {
	if err := ref.check(); err != nil {
		return fmt.Errorf("delete snapshot %s: %w", ref.ID, err)
	}
	return p.changeRecord(ctx, "delete snapshot "+ref.ID+" of", ref.Volume, func(r record, text []byte) error {
		if err := p.removeSnapshots(ctx, ref.Volume, snapshotPrefix(ref.ID)); err != nil {
			return err
		}
		if r.snapshot(ref.ID) == nil {
			return nil
		}
		r.Snapshots = slices.DeleteFunc(r.Snapshots, func(s rbdSnapshot) bool { return s.ID == ref.ID })
		_, err := p.write(ctx, ref.Volume, text, r)
		return err
	})
}

// removeSnapshots removes the RBD snapshots of a volume whose names begin with prefix. A missing RBD image is no error.
// The error wraps ErrInUse if an RBD snapshot has clones.
func (p *RBDPool) removeSnapshots(ctx context.Context, id, prefix string) error {
	i, err := p.image(ctx, id)
	if errors.Is(err, ErrRefused) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, s := range i.GetSnapshots() {
		if !strings.HasPrefix(s.GetName(), prefix) {
			continue
		}
		_, err := p.o.Client.RemoveSnapshot(ctx, &rbdv1.RemoveSnapshotRequest{Name: p.snapshotName(id, s.GetName())})
		if isCode(err, codes.FailedPrecondition) {
			return fmt.Errorf("%w: a volume that was made from snapshot %s still shares content with it", ErrInUse, s.GetName())
		}
		if err != nil {
			return rbdError(err)
		}
	}
	return nil
}

// source returns the name of the RBD snapshot from which a volume with this source is cloned.
func (p *RBDPool) source(ctx context.Context, from SnapshotRef) (*rbdv1.SnapshotName, error) {
	s, err := p.existingSnapshot(ctx, from)
	if err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", from.ID, err)
	}
	if s.State != Complete {
		return nil, fmt.Errorf("%w: snapshot %s is not complete", ErrRefused, from.ID)
	}
	return p.snapshotName(from.Volume, s.Name), nil
}

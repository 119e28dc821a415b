package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

const (
	// copyWithin is the maximum time of the copy of a volume.
	copyWithin = 12 * time.Hour
	// recordWithin is the maximum time to record that a copy has failed, or to remove a copy that could not be begun.
	// This is done even while the agent stops.
	recordWithin = 10 * time.Second
	// laterPause is the time between two attempts to begin a copy.
	laterPause = time.Second
	// clusterWithin is the maximum time in which a Ceph cluster must answer before QEMU begins a copy. It must be
	// longer than the 10 seconds after which trivet-rbd returns an error for a cluster that does not answer, because
	// the agent ends trivet-rbd after a call that exceeds its deadline.
	clusterWithin = 15 * time.Second
)

// Values of Snapshot.Consistency in the record of a snapshot. Package volume stores the value, and does not interpret
// it.
const (
	crashConsistent = "crash"
	fileSystem      = "file-system"
	detachedVolume  = "detached"
)

var (
	consistencies = map[string]cloud.SnapshotConsistency{
		crashConsistent: cloud.ConsistencyCrash, fileSystem: cloud.ConsistencyFileSystem, detachedVolume: cloud.ConsistencyDetached,
	}
	recordFormats = map[qcow2.Format]cloud.VolumeFormat{qcow2.Raw: cloud.VolumeRaw, qcow2.QCOW2: cloud.VolumeQCOW2}
)

// copyTask describes a goroutine that makes snapshots: either one snapshot without a group, or all snapshots of a
// group. The snapshots of a group are of different volumes and have the content of the same instant.
type copyTask struct {
	cancel  context.CancelFunc
	members []copyMember
}

// copyMember is one snapshot of a copyTask. want is the desired state of its volume when the task began.
type copyMember struct {
	want *agentv1.AssignedVolume
	ref  volume.SnapshotRef
}

// stepSnapshots tries to bring the snapshots of a volume to their desired states, and returns the resulting states.
// Copies that stepSnapshots begins continue after its return, until life ends. stepSnapshots returns nil if the volume
// cannot be used. The parameter place is nil if the pool cannot be used.
func (s *Storage) stepSnapshots(
	ctx, life context.Context, place pool, want *agentv1.AssignedVolume, stored bool,
) (out []cloud.SnapshotObservation, err error) {
	if place == nil || want.GetDeleted() || len(want.GetSnapshots()) == 0 {
		return nil, nil
	}
	if status, err := place.Status(ctx, want.GetVolumeId()); err != nil || status.Error != "" {
		if err == nil {
			err = errors.New(status.Error)
		}
		return s.lateSnapshots(want, stored, err), nil // The report of the volume contains the error.
	}
	p := snapshotsIn(place)
	for _, w := range want.GetSnapshots() {
		o, stepErr := s.stepSnapshot(ctx, life, p, want, w, stored)
		o.Snapshot = cloud.SnapshotID(w.GetSnapshotId())
		out = append(out, o)
		err = errors.Join(err, stepErr)
	}
	return out, err
}

// lateSnapshots is called while a volume cannot be used because of err. It reports the snapshots of the volume whose
// deadline has passed as failed, and no others. The host writes the records of these snapshots when the volume can be
// used again. The control plane ignores later reports that they are complete.
func (s *Storage) lateSnapshots(want *agentv1.AssignedVolume, stored bool, err error) (out []cloud.SnapshotObservation) {
	for _, w := range want.GetSnapshots() {
		ref := volume.SnapshotRef{Volume: want.GetVolumeId(), ID: w.GetSnapshotId()}
		if stored || w.GetDeleted() || w.GetMustExist() || time.Now().UnixMilli() <= w.GetDeadline() || s.copying(ref, false) {
			continue
		}
		o := failedSnapshot("the snapshot was not complete in time: " + brief(err))
		o.Snapshot = cloud.SnapshotID(ref.ID)
		out = append(out, o)
	}
	return out
}

// stepSnapshot tries to bring the snapshot w to its desired state, and returns the resulting state. If the assignment
// was read from disk (stored), stepSnapshot neither makes nor deletes the snapshot.
func (s *Storage) stepSnapshot(
	ctx, life context.Context, p snapshotPool, want *agentv1.AssignedVolume, w *agentv1.AssignedSnapshot, stored bool,
) (cloud.SnapshotObservation, error) {
	ref := volume.SnapshotRef{Volume: want.GetVolumeId(), ID: w.GetSnapshotId()}
	busy := cloud.SnapshotObservation{State: cloud.SnapshotCopying}
	if s.copying(ref, w.GetDeleted() && !stored) {
		return busy, nil
	}
	have, err := p.Snapshot(ctx, ref)
	if w.GetDeleted() {
		if stored {
			return busy, nil
		}
		if err := p.DeleteSnapshot(ctx, ref); err != nil {
			return busy, err
		}
		return cloud.SnapshotObservation{State: cloud.SnapshotAbsent}, nil
	}
	fail := func(reason string) (cloud.SnapshotObservation, error) {
		if err := p.FailSnapshot(ctx, ref, reason); err != nil {
			return busy, err
		}
		return failedSnapshot(reason), nil
	}
	switch {
	case errors.Is(err, volume.ErrNoSnapshot) && w.GetMustExist():
		return failedSnapshot(fmt.Sprintf("the snapshot was in %s before, and is missing now", poolText(want))), nil
	case errors.Is(err, volume.ErrNoSnapshot) && stored:
		return busy, nil
	case errors.Is(err, volume.ErrNoSnapshot) && time.Now().UnixMilli() > w.GetDeadline():
		return fail("the host could not begin the copy in time" + s.whyNotBegun(ref))
	case errors.Is(err, volume.ErrNoSnapshot):
		s.beginCopy(life, want, w)
		return busy, nil
	case errors.Is(err, volume.ErrRefused):
		return failedSnapshot(brief(err)), nil
	case err != nil:
		return busy, err
	case have.State == volume.Copying:
		if p.Shared() {
			return fail("the copy was interrupted: the agent of the host ended, or the volume has got another host")
		}
		return fail("the agent of the host ended during the copy")
	case have.State == volume.Failed:
		return failedSnapshot(have.Error), nil
	}
	return s.completeSnapshot(ctx, have, want, w), nil
}

func failedSnapshot(reason string) cloud.SnapshotObservation {
	return cloud.SnapshotObservation{State: cloud.SnapshotFailed, Error: reason}
}

// completeSnapshot returns the report of a complete snapshot. If another copy of the snapshot's group failed, the
// snapshot is reported as failed, unless the control plane already knows it as complete (MustExist).
func (s *Storage) completeSnapshot(
	ctx context.Context, have volume.Snapshot, want *agentv1.AssignedVolume, w *agentv1.AssignedSnapshot,
) cloud.SnapshotObservation {
	if !w.GetMustExist() {
		s.mu.Lock()
		others, _ := s.groupMembers(want, w)
		s.mu.Unlock()
		for _, m := range others {
			p, err := s.snapshotPool(m.want)
			if err != nil {
				continue
			}
			if other, err := p.Snapshot(ctx, m.ref); err == nil && other.State != volume.Complete {
				return failedSnapshot("the copy of another volume of the VM failed")
			}
		}
	}
	return cloud.SnapshotObservation{
		State: cloud.SnapshotComplete, TakenAt: have.TakenAt, Consistency: consistencies[have.Consistency],
		Format: recordFormats[have.Format], StoredBytes: have.Stored,
	}
}

// copying reports whether a copyTask is making the snapshot. If end is true, copying cancels that copyTask.
func (s *Storage) copying(ref volume.SnapshotRef, end bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.copies {
		if slices.ContainsFunc(t.members, func(m copyMember) bool { return m.ref == ref }) {
			if end {
				t.cancel()
			}
			return true
		}
	}
	return false
}

// endCopies cancels every copyTask that copies a volume, and reports whether there is one.
func (s *Storage) endCopies(id string) (found bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.copies {
		if slices.ContainsFunc(t.members, func(m copyMember) bool { return m.ref.Volume == id }) {
			t.cancel()
			found = true
		}
	}
	return found
}

// groupMembers returns the snapshots of the group of w, including w, which is a snapshot of the volume want. All of
// them must have the content of the same instant. If the host does not yet have the desired state of each of them,
// groupMembers returns false. The caller must hold mu.
func (s *Storage) groupMembers(want *agentv1.AssignedVolume, w *agentv1.AssignedSnapshot) (out []copyMember, complete bool) {
	if w.GetGroupId() == "" {
		return []copyMember{{want, volume.SnapshotRef{Volume: want.GetVolumeId(), ID: w.GetSnapshotId()}}}, true
	}
	for _, id := range w.GetGroupVolumes() {
		e := s.volumes[cloud.VolumeID(id)]
		if e == nil || e.stored {
			return out, false
		}
		all := e.want.GetSnapshots()
		at := slices.IndexFunc(all, func(o *agentv1.AssignedSnapshot) bool { return o.GetGroupId() == w.GetGroupId() })
		if at < 0 {
			return out, false
		}
		out = append(out, copyMember{e.want, volume.SnapshotRef{Volume: id, ID: all[at].GetSnapshotId()}})
	}
	return out, true
}

// beginCopy starts a copyTask that makes the snapshot w and the other snapshots of its group. It does nothing if the
// host does not yet have the desired state of each of them.
func (s *Storage) beginCopy(life context.Context, want *agentv1.AssignedVolume, w *agentv1.AssignedSnapshot) {
	key := w.GetGroupId() + w.GetSnapshotId()
	if w.GetGroupId() != "" {
		key = w.GetGroupId()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	members, complete := s.groupMembers(want, w)
	if !complete || s.copies[key] != nil || life.Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(life, copyWithin)
	t := &copyTask{cancel: cancel, members: members}
	s.copies[key] = t
	s.copiers.Go(func() {
		defer cancel()
		if err := s.runCopy(ctx, t); err != nil {
			s.o.Log.Warn("snapshot", "snapshot", key, "err", err)
		}
		s.mu.Lock()
		delete(s.copies, key)
		for _, m := range members {
			if e := s.volumes[cloud.VolumeID(m.ref.Volume)]; e != nil {
				e.touched = true
			}
		}
		s.notify()
		s.mu.Unlock()
	})
}

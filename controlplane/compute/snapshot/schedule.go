package snapshot

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// ScheduleEvery is the time between two calls of RunSchedules.
const ScheduleEvery = time.Minute

// schedulerName is the value of Snapshot.CreatedBy in the snapshots that a schedule creates.
const schedulerName = "schedule"

// RunSchedules creates the snapshots that are due according to the schedules of volumes, and deletes the snapshots that
// the schedules no longer keep. Package leader runs it on the leader. RunSchedules begins a transaction only for a
// volume whose snapshots must change.
func (s *Service) RunSchedules(ctx context.Context) error {
	var err error
	for _, step := range []scheduleStep{prune, s.createScheduled} {
		err = errors.Join(err, s.forScheduled(ctx, step))
	}
	return err
}

// scheduleStep is a part of RunSchedules for one volume. It reports whether there is something to do. If tx is nil, it
// changes nothing.
type scheduleStep func(r store.Reader, tx *store.Tx, v *cloud.Volume) (bool, error)

// forScheduled calls step for each volume with a schedule and a host. The first call has no transaction, and step only
// reports whether there is something to do. If step returns true, forScheduled calls it again, in a separate
// transaction for each volume.
func (s *Service) forScheduled(ctx context.Context, step scheduleStep) error {
	var needed []*cloud.Volume
	err := s.store.Local(func(r *store.View) error {
		all, _, err := volume.Scheduled.List(r, 0)
		if err != nil {
			return err
		}
		for _, one := range all {
			v, err := volume.Volumes.Get(r, one.Path...)
			if err != nil {
				return err
			}
			if v == nil || v.Node == "" || v.CheckSnapshots() != nil {
				continue
			}
			if do, err := step(r, nil, v); err != nil {
				return err
			} else if do {
				needed = append(needed, v)
			}
		}
		return nil
	})
	for _, v := range needed {
		_, updateErr := s.store.Update(ctx, func(tx *store.Tx) error {
			current, err := volume.Lookup(tx, v.Tenant(), v.ID)
			if err == nil {
				_, err = step(tx, tx, current)
			}
			return err
		})
		// NotFound means that the volume was deleted. After FailedPrecondition, for example because another snapshot is
		// PENDING, the next call of RunSchedules tries again.
		if updateErr != nil && !fault.Is(updateErr, fault.NotFound) && !fault.Is(updateErr, fault.FailedPrecondition) {
			err = errors.Join(err, fmt.Errorf("volume %s of project %s: %w", v.ID, v.Project, updateErr))
		}
	}
	return err
}

// prune deletes the snapshots that the schedule of the volume v no longer keeps, and reports whether there are such
// snapshots. If tx is nil, it deletes nothing.
func prune(r store.Reader, tx *store.Tx, v *cloud.Volume) (bool, error) {
	schedule, ok := v.Schedule()
	if !ok {
		return false, nil
	}
	all, err := volume.SnapshotsOf(r, v)
	if err != nil {
		return false, err
	}
	surplus := schedule.Surplus(all)
	if tx == nil {
		return len(surplus) > 0, nil
	}
	for _, old := range surplus {
		// FailedPrecondition means that a volume is being made from the snapshot.
		if _, err := volume.DropSnapshot(tx, v.Tenant(), old.ID); err != nil && !fault.Is(err, fault.FailedPrecondition) {
			return true, err
		}
	}
	return len(surplus) > 0, nil
}

// createScheduled creates a snapshot of the volume v if one is due according to its schedule, and reports whether one
// is due. If tx is nil, it creates nothing.
func (s *Service) createScheduled(r store.Reader, tx *store.Tx, v *cloud.Volume) (bool, error) {
	schedule, ok := v.Schedule()
	if !ok {
		return false, nil
	}
	all, err := volume.SnapshotsOf(r, v)
	if err != nil {
		return false, err
	}
	now := s.store.Now()
	if tx != nil {
		now = tx.Now()
	}
	begin, due := schedule.Due(all, now)
	due = due && v.ScheduledAt < begin // a snapshot that a caller has deleted is not created again
	if !due || tx == nil {
		return due, nil
	}
	id, err := newID()
	if err != nil {
		return true, err
	}
	return true, volume.AddSnapshot(tx, v.Tenant(), &cloud.Snapshot{
		ID: id, Name: scheduledName(v.ID, begin), Volume: v.ID, CreatedBy: schedulerName, Scheduled: true,
	})
}

// scheduledName returns the name of the snapshot for the interval that begins at the given time. The name ends with the
// last 12 digits of the volume's ID. They are random, so the name is unique in the project.
func scheduledName(id cloud.VolumeID, begin cloud.Time) string {
	return "scheduled-" + time.UnixMilli(begin).UTC().Format("20060102-1504") + "-" + string(id[len(id)-12:])
}

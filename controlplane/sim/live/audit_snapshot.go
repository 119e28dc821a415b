package live

import (
	"fmt"
	"maps"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// changeSnapshot applies one event of the table snapshot.
func (a *witness) changeSnapshot(e watch.Event, parts []string) error {
	id := cloud.SnapshotID(parts[2])
	before := a.snapshots[id]
	if e.Type == watch.EventDelete {
		delete(a.snapshots, id)
		if before == nil || !before.Deleted {
			return fmt.Errorf("the record of snapshot %s is removed, and it was not deleted: %+v", id, before)
		}
		a.removed = append(a.removed, before)
		a.f.trace.Add("commit %d: snapshot %s is no more", e.KV.ModRevision, id)
		return nil
	}
	now, err := decode[cloud.Snapshot](e.KV.Value)
	if err != nil {
		return err
	}
	a.snapshots[id] = now
	a.f.trace.Add("commit %d: snapshot %s is %s, deleted %t", e.KV.ModRevision, id, now.Status, now.Deleted)
	switch {
	case before == nil && now.Scheduled:
		a.f.count("scheduled snapshots")
		interval := fmt.Sprint(now.Volume, now.CreatedAt/snapshotEvery.Milliseconds())
		if a.scheduled[interval] {
			return fmt.Errorf("the schedule of volume %s creates snapshot %s in an interval in which it has created one", now.Volume, id)
		}
		a.scheduled[interval] = true
		return nil
	case before == nil:
		return nil
	case before.Deleted && !now.Deleted:
		return fmt.Errorf("the deleted snapshot %s is there again", id)
	case before.Status == cloud.SnapshotAvailable && (now.Status != before.Status || now.TakenAt != before.TakenAt):
		return fmt.Errorf("snapshot %s of %d becomes %s of %d: %s", id, before.TakenAt, now.Status, now.TakenAt, now.Reason)
	case before.Status == cloud.SnapshotError && now.Status != before.Status:
		return fmt.Errorf("snapshot %s goes from ERROR to %s", id, now.Status)
	case now.Status == cloud.SnapshotAvailable && !now.Deleted && !a.f.hasSnapshot(now.Node, now):
		return fmt.Errorf("snapshot %s is AVAILABLE, and its copy is not complete", id)
	}
	return nil
}

// addSnapshots calls add with the space of each snapshot in a pool. It checks that their volumes exist, and that
// hosts have no copies of the snapshots whose records were removed in this revision. If the volume was deleted in the
// same revision, its host deletes the copies later.
func (a *witness) addSnapshots(add func(on cloud.NodeID, poolID string, gib uint64)) error {
	removed := a.removed
	a.removed = nil
	for _, s := range removed {
		if s.Pool != "" && s.PoolID == "" && a.volumes.all[s.Volume] != nil && a.f.hasSnapshot(s.Node, s) {
			return fmt.Errorf("the record of snapshot %s is removed, and its copy exists", s.ID)
		}
	}
	groups := map[string]cloud.Time{}
	for id, s := range a.snapshots {
		if a.volumes.all[s.Volume] == nil {
			return fmt.Errorf("snapshot %s is of volume %s, which has no record", id, s.Volume)
		}
		if s.Pool != "" {
			add(s.Node, s.PoolID, s.SizeGiB)
		}
		if s.Group == "" || s.Status != cloud.SnapshotAvailable {
			continue
		}
		if taken, known := groups[s.Group]; known && taken != s.TakenAt {
			return fmt.Errorf("snapshots of group %s are of two instants", s.Group)
		}
		groups[s.Group] = s.TakenAt
	}
	return nil
}

// unsettledSnapshots describes a snapshot that is PENDING, whose bytes its host has not deleted yet, or that has no
// record. It returns "" if there is none.
func (a *witness) unsettledSnapshots() string {
	for _, id := range slices.Sorted(maps.Keys(a.snapshots)) {
		if s := a.snapshots[id]; s.Deleted || s.Status == cloud.SnapshotPending {
			return fmt.Sprintf("snapshot %s is %s: %+v", id, s.Status, s)
		}
	}
	kept := map[cloud.VolumeID]int{}
	for _, s := range a.snapshots {
		if s.Scheduled && s.Status == cloud.SnapshotAvailable {
			if kept[s.Volume]++; kept[s.Volume] > snapshotKeep {
				return fmt.Sprintf("the schedule of volume %s keeps %d snapshots", s.Volume, kept[s.Volume])
			}
		}
	}
	for _, h := range a.f.hosts {
		h.mu.Lock()
		for volume, v := range h.volumes {
			for id := range v.copies {
				if a.snapshots[id] == nil {
					defer h.mu.Unlock()
					return fmt.Sprintf("%s keeps snapshot %s of volume %s, which has no record", h.name, id, volume)
				}
			}
		}
		h.mu.Unlock()
	}
	return ""
}

// scheduledVolumes returns the IDs of the volumes with a schedule.
func (a *witness) scheduledVolumes() (out []cloud.VolumeID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(a.volumes.all)) {
		if _, ok := a.volumes.all[id].Schedule(); ok {
			out = append(out, id)
		}
	}
	return out
}

// snapshotIDs returns the IDs of all snapshots.
func (a *witness) snapshotIDs() []cloud.SnapshotID {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Sorted(maps.Keys(a.snapshots))
}

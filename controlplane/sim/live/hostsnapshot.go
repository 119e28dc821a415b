package live

import (
	"maps"
	"slices"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// copies are the snapshots of one volume, by ID.
type copies map[cloud.SnapshotID]*copied

// copied is a snapshot of a volume as its host, or the Ceph cluster, has stored it.
type copied struct {
	state   cloud.SnapshotState
	error   string
	takenAt cloud.Time
	// by and run identify the run of the agent that copies the volume, and end is the time at which the copy is
	// complete.
	by  *host
	run *agent
	end time.Time
}

// patience is how long a simulated agent tries to begin a snapshot. It is shorter than that of the real agent, so that
// the cloud settles in the time that fleet.settle allows.
const patience = 90 * time.Second

// settleSnapshots brings the snapshots of a volume to the states of the assignment a, and returns the reports about
// them. New snapshots are taken at the time now. If now is 0, none is begun. The snapshots of a group are begun only if
// the host has all volumes of the group. The caller must hold h.mu.
func (h *host) settleSnapshots(have copies, a *agentv1.AssignedVolume, all map[cloud.VolumeID]*agentv1.AssignedVolume, now cloud.Time) (out []cloud.SnapshotObservation) {
	for _, s := range a.GetSnapshots() {
		id := cloud.SnapshotID(s.GetSnapshotId())
		o := cloud.SnapshotObservation{Snapshot: id, State: cloud.SnapshotAbsent}
		c := have[id]
		switch {
		case s.GetDeleted():
			delete(have, id)
			c = nil
		case c == nil && s.GetMustExist():
			// A host with an old desired state may look for an RBD snapshot that another host has deleted. The record
			// of the snapshot does not change then, because only the reports of the present host count.
			c = &copied{state: cloud.SnapshotFailed, error: "the snapshot is missing"}
		case c == nil:
			c = h.beginSnapshot(s, all, now)
			if c != nil {
				have[id] = c
			}
		case c.state == cloud.SnapshotCopying && (c.by != h || c.run != h.agent):
			c.state, c.error = cloud.SnapshotFailed, "the copy was interrupted"
			h.f.count("snapshots interrupted")
		case c.state == cloud.SnapshotCopying && time.Now().After(c.end):
			c.state = cloud.SnapshotComplete
			h.f.count("snapshots complete")
		}
		if c != nil {
			o.State, o.Error = c.state, c.error
			if c.state == cloud.SnapshotComplete {
				o.TakenAt, o.Consistency, o.Format, o.StoredBytes = c.takenAt, cloud.ConsistencyCrash, cloud.VolumeQCOW2, 4096
			}
		}
		out = append(out, o)
	}
	return out
}

// beginSnapshot returns a new snapshot that is taken at the time now, or nil if the host does not begin it yet.
func (h *host) beginSnapshot(s *agentv1.AssignedSnapshot, all map[cloud.VolumeID]*agentv1.AssignedVolume, now cloud.Time) *copied {
	whole := !slices.ContainsFunc(s.GetGroupVolumes(), func(id string) bool {
		a := all[cloud.VolumeID(id)]
		return a == nil || a.GetDeleted() || !slices.ContainsFunc(a.GetSnapshots(), func(o *agentv1.AssignedSnapshot) bool {
			return o.GetGroupId() == s.GetGroupId() && !o.GetMustExist()
		})
	})
	switch {
	case time.Now().UnixMilli() > s.GetDeadline()-cloud.SnapshotStartTimeout+patience.Milliseconds():
		return &copied{state: cloud.SnapshotFailed, error: "the host could not begin the copy in time"}
	case !whole || now == 0:
		return nil
	}
	h.f.count("snapshots begun")
	return &copied{state: cloud.SnapshotCopying, takenAt: now, by: h, run: h.agent, end: time.Now().Add(h.drawn(time.Millisecond, 40*time.Second))}
}

// hasSnapshot reports whether a copy of a snapshot is complete on the host or in the common storage of the volume.
func (f *fleet) hasSnapshot(on cloud.NodeID, s *cloud.Snapshot) bool {
	complete := func(c copies) bool { return c[s.ID] != nil && c[s.ID].state == cloud.SnapshotComplete }
	if c := f.commonOf(s.Pool); c != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		i := c.volumes[s.Volume]
		return i != nil && complete(i.copies)
	}
	h := f.hostOf(on)
	h.mu.Lock()
	defer h.mu.Unlock()
	v := h.volumes[s.Volume]
	return v != nil && complete(v.copies)
}

// checkSource reports a violation if a volume is to be made from a snapshot that is not complete.
func (f *fleet) checkSource(h *host, a *agentv1.AssignedVolume, have copies) {
	from := cloud.SnapshotID(a.GetSource().GetSnapshotId())
	if c := have[from]; c == nil || c.state != cloud.SnapshotComplete {
		f.fail("%s is to make volume %s from snapshot %s, and has only the snapshots %v", h.name, a.GetVolumeId(), from, slices.Collect(maps.Keys(have)))
	}
	f.count("volumes made from snapshots")
}

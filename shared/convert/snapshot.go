package convert

import (
	"github.com/trivet-cloud/trivet/shared/cloud"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// Snapshot returns a snapshot record as the message of the API.
func Snapshot(s *cloud.Snapshot) *storagev1.Snapshot {
	return &storagev1.Snapshot{
		Id: string(s.ID), Name: s.Name, OrgId: string(s.Org), ProjectId: string(s.Project), VolumeId: string(s.Volume), GroupId: s.Group,
		SizeGib: s.SizeGiB, Status: storagev1.SnapshotStatus(s.Status), StatusReason: s.Reason,
		Consistency: storagev1.SnapshotConsistency(s.Consistency), TakenAt: s.TakenAt, StoredBytes: s.StoredBytes, Labels: copyMap(s.Labels),
		CreatedAt: s.CreatedAt, Scheduled: s.Scheduled,
	}
}

// AssignedSnapshot returns the desired state of a snapshot as the message that is sent to the agent on its host.
func AssignedSnapshot(s *cloud.Snapshot) *agentv1.AssignedSnapshot {
	if s.Deleted {
		return &agentv1.AssignedSnapshot{SnapshotId: string(s.ID), Deleted: true}
	}
	out := &agentv1.AssignedSnapshot{
		SnapshotId: string(s.ID), MustExist: s.Status != cloud.SnapshotPending, Deadline: s.Deadline, GroupId: s.Group,
	}
	for _, v := range s.GroupVolumes {
		out.GroupVolumes = append(out.GroupVolumes, string(v))
	}
	return out
}

func snapshotObservation(o cloud.SnapshotObservation) *agentv1.SnapshotObservation {
	return &agentv1.SnapshotObservation{
		SnapshotId: string(o.Snapshot), State: agentv1.SnapshotState(o.State), Error: o.Error, TakenAt: o.TakenAt,
		Consistency: storagev1.SnapshotConsistency(o.Consistency), Format: vmv1.VolumeFormat(o.Format), StoredBytes: o.StoredBytes,
	}
}

// snapshotObservationFrom is the inverse of snapshotObservation. Unknown values of enumerations become Unspecified.
func snapshotObservationFrom(o *agentv1.SnapshotObservation) cloud.SnapshotObservation {
	out := cloud.SnapshotObservation{
		Snapshot: cloud.SnapshotID(o.GetSnapshotId()), State: enum[cloud.SnapshotState](o.GetState()), Error: o.GetError(), TakenAt: o.GetTakenAt(),
		Consistency: enum[cloud.SnapshotConsistency](o.GetConsistency()), Format: enum[cloud.VolumeFormat](o.GetFormat()),
		StoredBytes: o.GetStoredBytes(),
	}
	if out.Consistency > cloud.ConsistencyDetached {
		out.Consistency = cloud.ConsistencyUnspecified
	}
	if out.Format > cloud.VolumeQCOW2 {
		out.Format = cloud.VolumeFormatUnspecified
	}
	return out
}

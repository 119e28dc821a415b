package cloud

import (
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

type (
	SnapshotID          string
	SnapshotStatus      uint8
	SnapshotConsistency uint8
	// SnapshotState is the state of a snapshot on its host, with the values of SnapshotState in agent.v1.
	SnapshotState uint8
)

const (
	SnapshotUnspecified SnapshotStatus = iota
	SnapshotPending
	SnapshotAvailable
	SnapshotError
)

const (
	ConsistencyUnspecified SnapshotConsistency = iota
	ConsistencyCrash
	ConsistencyFileSystem
	ConsistencyDetached
)

const (
	SnapshotStateUnspecified SnapshotState = iota
	SnapshotAbsent
	SnapshotCopying
	SnapshotComplete
	SnapshotFailed
)

func (s SnapshotStatus) String() string {
	return [...]string{"UNSPECIFIED", "PENDING", "AVAILABLE", "ERROR"}[min(s, SnapshotError)]
}

const (
	// MaxSnapshots is the maximum number of snapshots of a volume, including those whose bytes the host has not deleted
	// yet.
	MaxSnapshots = 32
	// SnapshotStartTimeout is the time in milliseconds, after the creation of a snapshot, within which the host must
	// begin to copy the volume. A copy that begins later would not have the content that the caller wanted.
	SnapshotStartTimeout = 10 * 60 * 1000
)

// Snapshot is the record of a snapshot of a volume. The content is a copy in a file in the storage pool of the volume,
// or an RBD snapshot for a volume of the driver RBD.
type Snapshot struct {
	ID      SnapshotID
	Name    string
	Org     OrgID
	Project ProjectID
	Volume  VolumeID
	// Group is an ID that all snapshots of one call of CreateVmSnapshots share. GroupVolumes are the volumes that have
	// a snapshot of the group. Both are empty for a snapshot that was created alone.
	Group        string     `cbor:",omitempty"`
	GroupVolumes []VolumeID `cbor:",omitempty"`
	// SizeGiB, Pool, PoolID and Node are the values that the volume had when the snapshot was created. In a shared
	// pool, the volume can be bound to another host since.
	SizeGiB   uint64
	Pool      string
	PoolID    string `cbor:",omitempty"`
	Node      NodeID
	Labels    map[string]string
	CreatedAt Time
	CreatedBy string
	// Counted is true if the snapshot counts in the quota of the number of snapshots. Records of older versions do not
	// have it.
	Counted bool `cbor:",omitempty"`
	// Scheduled is true if the schedule of the volume created the snapshot.
	Scheduled bool `cbor:",omitempty"`
	// Deadline is the latest time at which the host may begin the copy.
	Deadline Time

	Status      SnapshotStatus
	Reason      string // why the status is ERROR
	Consistency SnapshotConsistency
	TakenAt     Time
	Format      VolumeFormat
	StoredBytes uint64

	// Deleted is true if the snapshot was deleted, but the host has not reported yet that it has deleted the bytes.
	// Only a report for the volume's generation DeletedGeneration, or a later one, counts: in an earlier report, an
	// absent snapshot can be one that the host has not begun to copy.
	Deleted           bool   `cbor:",omitempty"`
	DeletedGeneration uint64 `cbor:",omitempty"`
}

// SnapshotRef names the snapshot whose content a new volume gets.
type SnapshotRef struct {
	Volume   VolumeID
	Snapshot SnapshotID
}

// SnapshotObservation is a host's report about one snapshot. Its fields are those of the message SnapshotObservation in
// agent.v1.
type SnapshotObservation struct {
	Snapshot    SnapshotID
	State       SnapshotState
	Error       string
	TakenAt     Time
	Consistency SnapshotConsistency
	Format      VolumeFormat
	StoredBytes uint64
}

// CheckSnapshot returns an InvalidArgument fault if name is not a valid name of a snapshot, or labels are not valid.
func CheckSnapshot(name string, labels map[string]string) error {
	if err := CheckName("name", name); err != nil {
		return err
	}
	if err := CheckPairs("labels", labels); err != nil {
		return err
	}
	return checkReserved("labels", labels, nil, nil)
}

// CheckSnapshotChange returns an InvalidArgument fault if a snapshot with the labels present cannot get this name and
// these labels. The result after is present with the changes. A label that an earlier version accepted can stay.
func CheckSnapshotChange(name string, labels, present, after map[string]string) error {
	if err := CheckName("name", name); err != nil {
		return err
	}
	if err := CheckPairs("labels", after); err != nil {
		return err
	}
	return checkReserved("labels", labels, present, nil)
}

// maxSnapshotReason is the maximum length in bytes of Snapshot.Reason. Observe truncates a longer reason of a host.
const maxSnapshotReason = 300

// Observe updates the snapshot from a report of its host, and returns whether the record changed. If the host reports a
// copy with another TakenAt than in an earlier report, the snapshot becomes ERROR, because its content has changed.
func (s *Snapshot) Observe(o SnapshotObservation) bool {
	before := *s
	switch {
	case o.State == SnapshotFailed:
		s.Status, s.Reason = SnapshotError, strings.ToValidUTF8(o.Error[:min(len(o.Error), maxSnapshotReason)], "")
	case o.State != SnapshotComplete || s.Status == SnapshotError && s.TakenAt == 0:
		return false
	case s.TakenAt != 0 && s.TakenAt != o.TakenAt && !mutant.On(mutant.ReplaceSnapshot):
		s.Status, s.Reason = SnapshotError, "the host has lost the copy, and has another one of a later instant"
	default:
		s.Status, s.Reason, s.Consistency, s.TakenAt = SnapshotAvailable, "", o.Consistency, o.TakenAt
		s.Format, s.StoredBytes = o.Format, o.StoredBytes
	}
	return s.Status != before.Status || s.Reason != before.Reason || s.StoredBytes != before.StoredBytes
}

// Equal reports whether two observations of a volume are the same.
func (o VolumeObservation) Equal(p VolumeObservation) bool {
	return o.Volume == p.Volume && o.Generation == p.Generation && o.Present == p.Present && o.SizeBytes == p.SizeBytes &&
		o.FlushedGeneration == p.FlushedGeneration && o.Error == p.Error && o.Flattened == p.Flattened &&
		o.FlattenPercent == p.FlattenPercent && o.Format == p.Format && slices.Equal(o.Snapshots, p.Snapshots)
}

// CheckSnapshots returns FailedPrecondition if no volume of this kind can have snapshots.
func (v *Volume) CheckSnapshots() error {
	if v.ExternalImage != "" {
		return fault.New(fault.FailedPrecondition, "volume %s is the registered RBD image %s: registered volumes cannot have snapshots", v.Name, v.ExternalImage)
	}
	return nil
}

// CheckSource returns an error if no volume of gib GiB can be made from the snapshot: FailedPrecondition if the
// snapshot is not AVAILABLE, and InvalidArgument if gib is less than the size of the snapshot.
func (s *Snapshot) CheckSource(gib uint64) error {
	if err := s.CheckAvailable(); err != nil {
		return err
	}
	if gib < s.SizeGiB {
		return fault.Invalid("size_gib", "the snapshot has %d GiB, the volume only %d", s.SizeGiB, gib)
	}
	return nil
}

// CheckAvailable returns FailedPrecondition if the snapshot is not AVAILABLE.
func (s *Snapshot) CheckAvailable() error {
	if s.Status != SnapshotAvailable {
		return fault.New(fault.FailedPrecondition, "snapshot %s is %s, not AVAILABLE", s.Name, s.Status)
	}
	return nil
}

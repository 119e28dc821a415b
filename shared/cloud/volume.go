package cloud

import (
	"fmt"
	"strconv"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

type (
	VolumeID     string
	VolumeFormat uint8
	VolumeStatus uint8
)

const (
	DriverUnspecified VolumeDriver = iota
	DriverManaged
	DriverRBD
)

const (
	VolumeFormatUnspecified VolumeFormat = iota
	VolumeRaw
	VolumeQCOW2
)

const (
	VolumeUnspecified VolumeStatus = iota
	VolumePending
	VolumeAvailable
	VolumeInUse
	VolumeError
)

func (s VolumeStatus) String() string {
	return [...]string{"UNSPECIFIED", "PENDING", "AVAILABLE", "IN_USE", "ERROR"}[min(s, VolumeError)]
}

// Variant returns the name of the driver in REST and in messages.
func (d VolumeDriver) Variant() string {
	return [...]string{"unspecified", "managed", "rbd"}[min(d, DriverRBD)]
}

// Keys of the metadata of a volume.
const (
	// VolumeReason is the key of the last error that the volume's host has reported. Only the control plane sets its
	// value.
	VolumeReason = "trivet/error"
	// VolumeFlatten is the metadata key for the progress of flattening the volume, in percent. Only the control plane
	// sets its value. A volume that is not being flattened does not have the key.
	VolumeFlatten = "trivet/flatten"
	// MaxIOPS and MaxBytesPerSecond lower the limits that the volume's storage class sets.
	MaxIOPS           = "trivet/max-iops"
	MaxBytesPerSecond = "trivet/max-bytes-per-second"
	// SnapshotEvery and SnapshotKeep are the metadata keys for the volume's SnapshotSchedule: the interval between two
	// snapshots, such as 24h, and the number of snapshots to keep.
	SnapshotEvery = "trivet/snapshot-every"
	SnapshotKeep  = "trivet/snapshot-keep"
)

// Volume is the record of a block volume. A volume exists independently of VMs, and is attached to at most one VM at a
// time.
//
// AttachmentGeneration grows with each attachment, and when the VM is migrated. FlushedGeneration is the generation of the last attachment
// whose data the host has flushed after closing the volume. A detached volume can be attached again when the two
// generations are equal. A host stores the generation of the last attachment that it has opened, and does not open the
// volume for an attachment with a lower generation.
type Volume struct {
	ID      VolumeID
	Name    string
	Org     OrgID
	Project ProjectID
	SizeGiB uint64
	Driver  VolumeDriver
	Class   string
	Format  VolumeFormat
	// Pool is the storage pool of the class, for the driver MANAGED.
	Pool string
	// PoolID is the ID of the storage pool if hosts share the pool. It is set when the volume is bound to a host for
	// the first time. It is empty before, and for volumes that only one host can use.
	PoolID string `cbor:",omitempty"`
	// ClassLimits are the limits of the class. When the limits of the class change, the leader changes ClassLimits of
	// all its volumes soon afterwards. The method Limits returns the limits that apply.
	ClassLimits Limits
	// Encrypted is true if the class of the volume is encrypted. The volume's key is in a separate record.
	Encrypted bool `cbor:",omitempty"`
	// ExternalImage is the name of the RBD image of a registered volume: an image that existed before the volume and
	// stays when the volume is deleted (see external.go of package controlplane/compute/volume). It is empty for
	// volumes that Trivet makes.
	ExternalImage string `cbor:",omitempty"`
	// Image is the image from which the host makes the volume. It is nil for a blank volume and for a flattened volume.
	Image *ImageRef `cbor:",omitempty"`
	// Source is the snapshot from which the host makes the volume, or nil.
	Source    *SnapshotRef `cbor:",omitempty"`
	CreatedAt Time
	UpdatedAt Time
	CreatedBy string
	Metadata  map[string]string
	Labels    map[string]string

	// Node is the host to which the volume is bound. For the driver MANAGED, the first attachment sets Node. For the
	// driver RBD, the leader sets Node soon after the creation of the volume. Node changes afterwards only if the
	// volume is Movable, and only while the volume is detached and flushed, or if HostRemoved is true.
	Node NodeID
	// HostRemoved is true if the host Node was removed from the cluster, or was lost, before it reported the volume as
	// flushed. It is set only for volumes in shared pools, until the volume is bound to another host, or until a lost host
	// that has come back reports the volume as flushed.
	HostRemoved bool `cbor:",omitempty"`
	// VM is the VM that has the volume attached, and Disk is the ID of the disk in the VM. Both are empty if the volume
	// is detached.
	VM   VMID
	Disk string
	// Generation grows by 1 with each change of the desired state that the host receives.
	Generation           uint64
	AttachmentGeneration uint64
	FlushedGeneration    uint64
	// Fence is true if a host that may still run the VM of the last attachment was removed from the cluster, or if the VM
	// was deleted between the switchover and the end of a migration (see FenceMigrated). The present host of the volume must then make the Ceph cluster refuse the requests of that VM's process before it
	// reports the attachment generation as flushed. Only volumes of the driver RBD are fenced.
	Fence bool `cbor:",omitempty"`
	// Other is the other host of a migration of the VM: the target before the switchover, and the source after it. Other
	// may have the volume open, but must not write to it. StandbyGeneration is the attachment generation that the target
	// gets at the switchover. See SetHosts.
	Other             NodeID `cbor:",omitempty"`
	StandbyGeneration uint64 `cbor:",omitempty"`
	// Granted is the highest attachment generation that was ever given to a host or reserved for one. It is 0 in records
	// of earlier versions, which had no reserved generations.
	Granted uint64 `cbor:",omitempty"`
	// Migrated is true if AttachmentGeneration was given to the host Node by a migration of the VM. A process of the VM on
	// that host may have opened the volume with a lower generation.
	Migrated bool `cbor:",omitempty"`
	// Ending is true if the host on which the volume was attached to VM is lost. The volume stays attached to the VM,
	// but its present host first ends the attachment: for a volume of the driver RBD as described for Fence, for a
	// volume in a shared pool as soon as no process of the former host holds the lock of the file. Ending becomes false
	// when the volume is attached to the VM on the VM's next host.
	Ending bool `cbor:",omitempty"`
	// Present is true after the host has reported that it has made the volume.
	Present bool
	// LastError is the error in the last report of the host.
	LastError string
	// Flatten is true from the request to flatten the volume until the host has reported the volume as flattened.
	// FlattenPercent is the finished part of the flattening in percent, rounded down to a multiple of flattenStep.
	Flatten        bool   `cbor:",omitempty"`
	FlattenPercent uint32 `cbor:",omitempty"`
	// ScheduledAt is when the schedule of the volume last created a snapshot.
	ScheduledAt Time `cbor:",omitempty"`
}

// flattenStep is the smallest difference, in percent, between two recorded values of Volume.FlattenPercent. It limits
// the number of raft log entries that are written while a volume is flattened.
const flattenStep = 10

// VolumeObservation is a host's report about one volume. Its fields are those of the message VolumeObservation in
// agent.v1.
type VolumeObservation struct {
	Volume            VolumeID
	Generation        uint64
	Present           bool
	SizeBytes         uint64
	FlushedGeneration uint64
	Error             string
	Flattened         bool
	FlattenPercent    uint32
	Format            VolumeFormat
	Snapshots         []SnapshotObservation
}

// Tenant returns the org and project that own the volume.
func (v *Volume) Tenant() Tenant { return Tenant{v.Org, v.Project} }

// SizeBytes returns the size of the volume in bytes.
func (v *Volume) SizeBytes() uint64 { return v.SizeGiB << 30 }

// RBDImage returns the name of the RBD image of a volume of the driver RBD. If the volume is not a registered one,
// package nodeagent/volume makes the image with this name.
func (v *Volume) RBDImage() string {
	if v.ExternalImage != "" {
		return v.ExternalImage
	}
	return "volume-" + string(v.ID)
}

// Flushed reports whether the host has closed the volume and flushed everything that the last VM wrote.
func (v *Volume) Flushed() bool { return v.FlushedGeneration == v.AttachmentGeneration }

// Status returns the status that the API shows. A volume that was detached is IN_USE until it is flushed. A volume that
// is made from a snapshot is PENDING until its host has copied the snapshot. A volume of the driver RBD is PENDING
// until a host has made the RBD image. A registered volume is PENDING until a host has checked its RBD image.
func (v *Volume) Status() VolumeStatus {
	switch {
	case v.VM != "" || !v.Flushed():
		return VolumeInUse
	case v.LastError != "":
		return VolumeError
	case (v.Source != nil || v.Driver == DriverRBD) && !v.Present:
		return VolumePending
	}
	return VolumeAvailable
}

// CheckVolume returns an InvalidArgument fault if a field of the volume that a caller may set is invalid.
func CheckVolume(v *Volume) error {
	if err := CheckName("name", v.Name); err != nil {
		return err
	}
	if err := CheckVolumeSize(v.SizeGiB); err != nil {
		return err
	}
	if v.Driver > DriverRBD {
		return fault.Invalid("driver", "unknown value %d", v.Driver)
	}
	if v.Class != "" {
		if err := CheckName("storage_class", v.Class); err != nil {
			return err
		}
	}
	if err := CheckVolumePairs(v.Metadata, v.Labels); err != nil {
		return err
	}
	return CheckVolumeKeys(v.Metadata, v.Labels, &Volume{})
}

// CheckVolumePairs returns an InvalidArgument fault if these cannot be the metadata and the labels of a volume.
func CheckVolumePairs(metadata, labels map[string]string) error {
	if err := CheckPairs("metadata", metadata); err != nil {
		return err
	}
	for _, key := range []string{VolumeReason, VolumeFlatten} {
		if _, ok := metadata[key]; ok {
			return fault.Invalid("metadata", "%s is set by the control plane only", key)
		}
	}
	for _, key := range []string{MaxIOPS, MaxBytesPerSecond} {
		if text, ok := metadata[key]; ok && text != "" {
			if n, err := strconv.ParseUint(text, 10, 64); err != nil || n == 0 || n > MaxLimit {
				return fault.Invalid("metadata", "%s must be a number from 1 to %d", key, uint64(MaxLimit))
			}
		}
	}
	if err := checkSchedule(metadata); err != nil {
		return err
	}
	return CheckPairs("labels", labels)
}

// CheckVolumeSize returns an InvalidArgument fault if a volume cannot have this size.
func CheckVolumeSize(gib uint64) error {
	if gib < 1 || gib > MaxDiskGiB {
		return fault.Invalid("size_gib", "must be 1 to %d, got %d", MaxDiskGiB, gib)
	}
	return nil
}

// Attach attaches the volume to a VM on the host node, as the disk with the given ID, and increments the attachment
// generation. It returns FailedPrecondition and changes nothing if a VM has the volume, if its last attachment is not
// flushed, if no host has checked the image of a registered volume, or if the volume is bound to another host. The last
// condition does not apply to a Movable volume, which Attach binds to the host node.
func (v *Volume) Attach(vm VMID, disk string, node NodeID) error {
	if v.VM != "" && !(v.Ending && v.VM == vm) && !mutant.On(mutant.AttachTwice) {
		f := fault.New(fault.FailedPrecondition, "volume %s is attached to VM %s", v.Name, v.VM)
		return f.WithReason("VOLUME_IN_USE").With("vm", string(v.VM))
	}
	if !v.Flushed() && !mutant.On(mutant.AttachUnflushed) {
		return v.errNotFlushed()
	}
	if err := v.checkRegistered("attached"); err != nil && !mutant.On(mutant.AttachUnchecked) {
		return err
	}
	if !v.Movable() && v.Node != "" && v.Node != node && !mutant.On(mutant.AttachElsewhere) {
		return fault.New(fault.FailedPrecondition, "volume %s is on host %s, and the VM is on host %s", v.Name, v.Node, node).
			WithReason("VOLUME_ELSEWHERE")
	}
	v.VM, v.Disk, v.Node, v.Ending, v.Migrated = vm, disk, node, false, false
	if !mutant.On(mutant.KeepAttachmentGeneration) {
		v.AttachmentGeneration = v.grant()
	}
	v.Generation++
	return nil
}

// errNotFlushed returns the error of Attach for a volume whose last attachment is not flushed.
func (v *Volume) errNotFlushed() error {
	text := fmt.Sprintf("host %s has not flushed volume %s since it was detached: try again later", v.Node, v.Name)
	switch {
	case v.HostRemoved:
		text = fmt.Sprintf("host %s was removed from the cluster before it flushed volume %s, and no other host of the storage pool %s is READY: try again later",
			v.Node, v.Name, v.Pool)
	case v.PoolID != "":
		text += ". If the host is lost, an operator must evict it"
	}
	return fault.New(fault.FailedPrecondition, "%s", text).WithReason("VOLUME_NOT_FLUSHED")
}

// Move binds a Movable volume to another host, which then makes, enlarges or fences the file or RBD image if needed. If
// a VM has the volume or its last attachment is not flushed, its present host may still have the volume open. Move then
// returns false and changes nothing, unless Fence or HostRemoved is true. If Fence is true, the new host fences the RBD
// image. If HostRemoved is true, the new host ends the last attachment as soon as no process of the former host holds
// the lock of the file. Ending has both effects, and the volume stays attached. Move also returns false if the volume is not Movable or is already bound to the host.
func (v *Volume) Move(node NodeID) bool {
	if !v.Movable() || v.Node == node {
		return false
	}
	open := v.VM != "" || !v.Flushed() && !v.Fence
	if open && !v.HostRemoved && !v.Ending && !mutant.On(mutant.MoveUnflushed) {
		return false
	}
	v.Node, v.HostRemoved = node, false
	v.Generation++
	return true
}

// Detach records that no VM has the volume. The caller must make sure that the VM can no longer use the volume: the
// host must have reported that the VM has no process, or that the guest has released the disk. The volume can be
// attached again when the host has reported it as flushed.
func (v *Volume) Detach() {
	if v.Ending {
		v.HostRemoved = v.PoolID != "" && !v.Flushed()
	}
	v.VM, v.Disk, v.Ending = "", "", false
	v.Generation++
}

// LoseHost records that the volume's host was removed from the cluster, and returns whether the volume changed. name is
// the name of the host. LoseHost detaches the volume. A Movable volume that is detached and flushed does not change. Neither does
// a volume whose attachment is Ending: it moves to another host, which ends the attachment.
// The removed host may still have any other volume open. An RBD volume gets Fence: no VM can have it until another host
// has fenced it. If a VM had the RBD volume, its last attachment may have been reported as flushed before, so LoseHost
// also increments the attachment generation. A volume in a shared pool gets HostRemoved, so that another host ends its
// last attachment.
func (v *Volume) LoseHost(name string) bool {
	if v.Movable() && v.VM == "" && v.Flushed() || v.Ending {
		return false
	}
	v.LastError = "the host " + name + ", which had the volume, was removed from the cluster"
	if v.VM != "" {
		v.Detach()
		if v.Driver == DriverRBD && !mutant.On(mutant.FlushLostHost) {
			v.AttachmentGeneration = v.grant()
		}
	}
	v.HostRemoved = v.PoolID != "" && !v.Flushed()
	v.Fence = v.Driver == DriverRBD && !v.Flushed()
	return true
}

// RequestFlatten records that the host must make the volume independent of its image. It returns false and changes
// nothing if the volume has no image or is already being flattened.
func (v *Volume) RequestFlatten() (changed bool) {
	if v.Image == nil || v.Flatten {
		return false
	}
	v.Flatten, v.FlattenPercent = true, 0
	v.Generation++
	return true
}

// observeFlatten updates the fields about flattening from a report of the host. It ignores reports about a generation
// that is older than that of the desired state.
func (v *Volume) observeFlatten(o VolumeObservation) {
	switch {
	case !v.Flatten || o.Generation < v.Generation && !mutant.On(mutant.FlattenEarly):
	case o.Present && (o.Flattened || mutant.On(mutant.FlattenEarly)):
		v.Image, v.Flatten, v.FlattenPercent = nil, false, 0
		if o.Format == VolumeRaw || o.Format == VolumeQCOW2 {
			v.Format = o.Format
		}
		v.Generation++
	case v.Flatten:
		if step := min(o.FlattenPercent, 100) / flattenStep * flattenStep; step > v.FlattenPercent {
			v.FlattenPercent = step
		}
	}
}

// Resize sets a greater size. Resize returns false if the volume has this size already, and InvalidArgument if the
// volume is larger. It returns FailedPrecondition if no host has checked the image of a registered volume.
func (v *Volume) Resize(gib uint64) (changed bool, err error) {
	switch {
	case gib < v.SizeGiB:
		return false, fault.Invalid("size_gib", "volume %s has %d GiB, and volumes cannot be made smaller", v.Name, v.SizeGiB)
	case gib == v.SizeGiB:
		return false, nil
	}
	if err := v.checkRegistered("resized"); err != nil {
		return false, err
	}
	v.SizeGiB = gib
	v.Generation++
	return true, nil
}

// Observe updates the volume from a report of its host, and returns whether the record changed. From a report about an
// older generation, Observe takes only Present and FlushedGeneration, which never go back. The caller must check that
// the volume is bound to the host.
func (v *Volume) Observe(o VolumeObservation) bool {
	before := *v
	v.Present = v.Present || o.Present
	flushed := o.FlushedGeneration
	if !mutant.On(mutant.FlushUngranted) {
		flushed = min(flushed, v.AttachmentGeneration)
	}
	v.FlushedGeneration = max(v.FlushedGeneration, flushed)
	v.Fence = v.Fence && !v.Flushed()
	v.HostRemoved = v.HostRemoved && (!v.Flushed() || mutant.On(mutant.KeepHostRemoved))
	if o.Generation >= v.Generation {
		v.LastError = o.Error
	}
	v.observeFlatten(o)
	return v.Flatten != before.Flatten || v.FlattenPercent != before.FlattenPercent || v.Present != before.Present || v.FlushedGeneration != before.FlushedGeneration || v.HostRemoved != before.HostRemoved || v.LastError != before.LastError
}

package storage

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

var (
	imageFormats = map[vmv1.ImageFormat]qcow2.Format{
		vmv1.ImageFormat_IMAGE_FORMAT_RAW: qcow2.Raw, vmv1.ImageFormat_IMAGE_FORMAT_QCOW2: qcow2.QCOW2,
	}
	volumeFormats = map[vmv1.VolumeFormat]qcow2.Format{
		vmv1.VolumeFormat_VOLUME_FORMAT_RAW: qcow2.Raw, vmv1.VolumeFormat_VOLUME_FORMAT_QCOW2: qcow2.QCOW2,
	}
	cloudFormats = map[qcow2.Format]cloud.VolumeFormat{qcow2.Raw: cloud.VolumeRaw, qcow2.QCOW2: cloud.VolumeQCOW2}
)

// describe converts an assigned volume to a volume.Volume.
func describe(want *agentv1.AssignedVolume) volume.Volume {
	v := volume.Volume{
		ID: want.GetVolumeId(), Size: want.GetSizeBytes(), Format: volumeFormats[want.GetFormat()],
		Encrypted: want.GetEncrypted(), Key: want.GetEncryptionKey(),
	}
	if i := want.GetImage(); i != nil {
		v.Image = &disk.Image{SHA256: i.GetSha256(), Size: int64(i.GetSizeBytes()), Format: imageFormats[i.GetFormat()]}
	}
	if from := want.GetSource(); from != nil {
		v.Source = &volume.SnapshotRef{Volume: from.GetVolumeId(), ID: from.GetSnapshotId()}
	}
	return v
}

// pool returns the open pool with this name. If no such pool is open, the error says why.
func (s *Storage) pool(name string) (*volume.Pool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.pools[name]; p != nil {
		return p, nil
	}
	if err := s.failed[name]; err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("this host has no storage pool %q", name)
}

// pool has the methods of a storage pool that Storage calls. filePool implements it for a directory of the host, and
// volume.RBDPool for a pool of a Ceph cluster.
type pool interface {
	Create(ctx context.Context, v volume.Volume) error
	Resize(ctx context.Context, id string, size uint64) error
	Delete(ctx context.Context, id string) error
	Status(ctx context.Context, id string) (volume.Status, error)
	Open(ctx context.Context, id string, a volume.Attachment) (volume.Files, error)
	Release(ctx context.Context, id string, a volume.Attachment) error
	Detach(ctx context.Context, id string, generation uint64) error
	Flatten(ctx context.Context, id string, progress func(percent uint32)) error
	sharedPool
}

// filePool adapts volume.Pool to the interface pool. It only adds the context parameter of Status.
type filePool struct{ *volume.Pool }

func (p filePool) Status(_ context.Context, id string) (volume.Status, error) {
	return p.Pool.Status(id)
}

// poolOf returns the pool in which an assigned volume is stored.
func (s *Storage) poolOf(want *agentv1.AssignedVolume) (pool, error) {
	if want.GetRbd() != nil {
		p, err := s.ceph.pool(want.GetRbd())
		if err != nil {
			return nil, err
		}
		return p.Registered(want.GetExternalImage()), nil
	}
	if want.GetPool() == "" { // want is from a VM's disk, and the list of volumes has not arrived yet.
		return nil, errNoKey
	}
	p, err := s.pool(want.GetPool())
	if err != nil {
		return nil, err
	}
	return filePool{p}, nil
}

// step tries to bring one volume and its snapshots to their desired state, and reports the resulting state. Snapshot
// copies that step begins continue after its return, until ctx ends.
func (s *Storage) step(ctx context.Context, want *agentv1.AssignedVolume, stored bool) error {
	bounded, cancel := context.WithTimeout(ctx, timeOfStep(want))
	defer cancel()
	p, err := s.poolOf(want)
	if err == nil {
		err = s.apply(bounded, p, want, stored)
	}
	snapshots, snapshotErr := s.stepSnapshots(bounded, ctx, p, want, stored)
	if err == nil {
		err = snapshotErr
	}
	if bounded.Err() != nil {
		return err // An error may be caused by the end of the context, so it is not reported.
	}
	status := s.observe(bounded, p, want, snapshots, err)
	if err != nil || want.GetDeleted() || want.GetStandby() || !want.GetFlatten() && !status.Clone {
		return err
	}
	pending := func(o cloud.SnapshotObservation) bool { return o.State == cloud.SnapshotCopying }
	if slices.ContainsFunc(snapshots, pending) {
		return errLater // The copy needs the lock of the volume, which flattening may hold for hours.
	}
	if err = s.flatten(ctx, p, want); ctx.Err() == nil && !errors.Is(err, volume.ErrInUse) {
		s.observe(ctx, p, want, snapshots, err)
	}
	return err
}

// timeOfStep returns the maximum time of a step. The copy of a snapshot that a volume is made from cannot be continued
// after an interruption, so its time depends on its size.
func timeOfStep(want *agentv1.AssignedVolume) time.Duration {
	if want.GetSource() == nil {
		return stepWithin
	}
	return stepWithin + time.Duration(want.GetSizeBytes()>>30)*copyPerGiB
}

// observe reports the state of a volume and its snapshots, and the error of the last change. The parameter p is nil if
// the pool cannot be used. observe returns the state of the volume in the pool, or a zero Status if the pool does not
// have the volume.
func (s *Storage) observe(
	ctx context.Context, p pool, want *agentv1.AssignedVolume, snapshots []cloud.SnapshotObservation, err error,
) (status volume.Status) {
	o := cloud.VolumeObservation{
		Volume: cloud.VolumeID(want.GetVolumeId()), Generation: want.GetGeneration(), Snapshots: snapshots,
	}
	if p != nil {
		var statusErr error
		if status, statusErr = p.Status(ctx, want.GetVolumeId()); statusErr == nil && status.Error == "" {
			o.Present, o.SizeBytes, o.FlushedGeneration = true, status.Size, status.Flushed
			if status.Flattened {
				o.Flattened, o.Format = true, cloudFormats[status.Format]
			}
		}
	}
	if err != nil && !isTemporary(err) {
		o.Error = brief(err)
	}
	s.report(o)
	return status
}

// isTemporary reports whether err is expected to disappear without help: a guest of this host still has the volume
// open, or another host is importing the volume's image. Such errors are not reported. If another host of a shared pool
// has the volume open, this is reported, because no other report says so.
func isTemporary(err error) bool {
	return errors.Is(err, volume.ErrInUse) && !errors.Is(err, volume.ErrElsewhere) || errors.Is(err, volume.ErrImporting)
}

// apply makes, grows, detaches or deletes a volume of the pool p.
func (s *Storage) apply(ctx context.Context, p pool, want *agentv1.AssignedVolume, stored bool) error {
	id := want.GetVolumeId()
	if want.GetDeleted() {
		if stored && !mutant.On(mutant.DeleteStored) {
			return nil
		}
		if s.endCopies(id) {
			return fmt.Errorf("delete volume %s: %w", id, volume.ErrInUse)
		}
		return p.Delete(ctx, id)
	}
	if want.GetStandby() { // The VM's host has the volume.
		return nil
	}
	if want.GetSource() != nil {
		if _, err := p.Status(ctx, id); errors.Is(err, volume.ErrNotFound) {
			select {
			case s.restoreSlots <- struct{}{}:
				defer func() { <-s.restoreSlots }()
			default:
				return errRestoreLater
			}
		}
	}
	if err := ensure(ctx, p, want); err != nil {
		return err
	}
	if want.GetVmId() == "" {
		if s.isUnconfirmed(cloud.VolumeID(id)) && !mutant.On(mutant.DetachUnconfirmed) {
			return fmt.Errorf("detach volume %s: %w: a VM is opening it", id, volume.ErrInUse)
		}
		if rbd, ok := p.(*volume.RBDPool); ok && want.GetFence() {
			return rbd.Fence(ctx, id, want.GetAttachmentGeneration())
		}
		return p.Detach(ctx, id, want.GetAttachmentGeneration())
	}
	return nil
}

// errRestoreLater means that enough other volumes are being made from snapshots. It is temporary.
var errRestoreLater = fmt.Errorf("make the volume from its snapshot later: %w", volume.ErrInUse)

// ensure makes a volume if the pool does not have it, and grows it to its size. For a registered volume, ensure checks
// the RBD image instead of making one.
func ensure(ctx context.Context, p pool, want *agentv1.AssignedVolume) error {
	id := want.GetVolumeId()
	status, err := p.Status(ctx, id)
	switch {
	case err == nil && status.Error != "":
		return errors.New(status.Error)
	case err == nil && status.Encrypted != want.GetEncrypted() && !mutant.On(mutant.OpenPlainVolume):
		// A person with access to the pool may have replaced an encrypted file by a plain one, to read later writes of
		// the guest.
		return fmt.Errorf("%w: only one of the required volume %s and the volume in %s is encrypted", volume.ErrRefused, id, poolText(want))
	case err == nil && status.Size >= want.GetSizeBytes():
		return nil
	case err == nil:
		return p.Resize(ctx, id, want.GetSizeBytes())
	case !errors.Is(err, volume.ErrNotFound):
		return err
	case want.GetMustExist() && !want.GetCheckImage():
		return fmt.Errorf("volume %s was in %s before, and is missing now", id, poolText(want))
	}
	return p.Create(ctx, describe(want))
}

// errBeingMade is the error of Open for a volume whose content Run copies from a snapshot. Open does not make the
// copy, because it may take longer than a VM's start.
var errBeingMade = errors.New("the volume is being made from its snapshot")

var errNotAttached = errors.New("the volume is not attached to the VM any more")

// Open opens a volume for the disk of a VM. It makes the volume if the pool does not have it. The parameter want is the
// desired state of the volume in the VM's assignment. The newest known desired state, want or a newer one, must attach
// the volume to the VM. The errors are the errors of volume.Pool.Open and volume.RBDPool.Open, and volume.ErrNoKey for
// an encrypted volume whose key has not arrived from the control plane. The caller passes duplicates of the files to
// QEMU and closes the files. Only Run makes a volume that has the content of a snapshot.
func (s *Storage) Open(ctx context.Context, vm cloud.VMID, disk string, want *agentv1.AssignedVolume) (volume.Files, error) {
	want = s.newest(want)
	if want.GetDeleted() || want.GetVmId() != string(vm) || want.GetDiskId() != disk ||
		want.GetStandby() && !mutant.On(mutant.OpenStandbyVolume) {
		return volume.Files{}, fmt.Errorf("open volume %s: %w", want.GetVolumeId(), errNotAttached)
	}
	p, err := s.poolOf(want)
	if err != nil {
		return volume.Files{}, err
	}
	if want.GetEncrypted() && len(want.GetEncryptionKey()) == 0 {
		return volume.Files{}, fmt.Errorf("open volume %s: %w", want.GetVolumeId(), volume.ErrNoKey)
	}
	if want.GetSource() != nil {
		_, err := p.Status(ctx, want.GetVolumeId())
		if errors.Is(err, volume.ErrNotFound) {
			s.touch(cloud.VolumeID(want.GetVolumeId()))
			return volume.Files{}, fmt.Errorf("open volume %s: %w", want.GetVolumeId(), errBeingMade)
		}
	}
	defer s.stopFlattening(cloud.VolumeID(want.GetVolumeId()))()
	if err := ensure(ctx, p, want); err != nil {
		return volume.Files{}, err
	}
	a := volume.Attachment{VM: string(vm), Generation: want.GetAttachmentGeneration()}
	if rbd, ok := p.(*volume.RBDPool); ok && want.GetMigrated() {
		if err := rbd.EndMigrated(ctx, want.GetVolumeId(), a.Generation); err != nil {
			return volume.Files{}, err
		}
	}
	files, err := p.Open(ctx, want.GetVolumeId(), a)
	files.Key = want.GetEncryptionKey()
	if err == nil && files.RBD != nil {
		s.setUnconfirmed(cloud.VolumeID(want.GetVolumeId()), true)
	}
	return files, err
}

// setUnconfirmed stores whether a process is about to open the RBD image of a volume. Until the process has opened the
// image, the Ceph cluster does not see a client, and the volume must not be detached.
func (s *Storage) setUnconfirmed(id cloud.VolumeID, unconfirmed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.volumes[id]; e != nil {
		e.unconfirmed = unconfirmed
	}
}

func (s *Storage) isUnconfirmed(id cloud.VolumeID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.volumes[id]
	return e != nil && e.unconfirmed
}

// poolText returns the name of an assigned volume's pool for an error text.
func poolText(want *agentv1.AssignedVolume) string {
	if r := want.GetRbd(); r != nil {
		return "the Ceph pool " + r.GetPool()
	}
	return "the storage pool " + want.GetPool() + " of this host"
}

// newest returns the newest known desired state of a volume: want or the desired state in s.volumes. If want is newer,
// it replaces the desired state in s.volumes. If want lacks the Ceph pool and its key, newest copies both from
// s.volumes, because the control plane sends them only in the list of volumes.
func (s *Storage) newest(want *agentv1.AssignedVolume) *agentv1.AssignedVolume {
	id := cloud.VolumeID(want.GetVolumeId())
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.volumes[id]
	if e == nil {
		return want
	}
	if want.GetGeneration() > e.want.GetGeneration() {
		if at := e.want.GetRbd(); at != nil && want.GetRbd() == nil {
			want = proto.CloneOf(want)
			want.Rbd = at
		}
		s.setDesired(id, want, false)
		s.notify()
	}
	return s.volumes[id].want
}

// Release is called when no process of the VM has the volume open any more. Release syncs the content to the disk and
// records that the content is complete. The error wraps volume.ErrInUse if a process still has the volume open. The
// parameter pool is the name of a storage pool of the host, or "" for an RBD image, whose Ceph pool is in the desired
// state of the volume. Release does nothing for an RBD image that the control plane does not assign to this host any
// more: the host was lost, and another host has ended the attachment.
func (s *Storage) Release(ctx context.Context, pool string, id cloud.VolumeID, vm cloud.VMID, generation uint64) error {
	s.setUnconfirmed(id, false)
	want := &agentv1.AssignedVolume{Pool: pool}
	if pool == "" {
		var current bool
		switch want, current = s.desiredNow(id); {
		case want == nil && current:
			return nil
		case want == nil:
			return fmt.Errorf("release volume %s: %w", id, errNoKey)
		}
	}
	p, err := s.poolOf(want)
	if err != nil {
		return err
	}
	err = p.Release(ctx, string(id), volume.Attachment{VM: string(vm), Generation: generation})
	if err != nil && !errors.Is(err, volume.ErrStale) { // ErrStale: a later attachment has begun, so this one was flushed.
		return err
	}
	s.touch(id)
	return nil
}

// Confirm checks that an attachment, for which a process of the VM has just opened the RBD image of a volume, has not
// ended. The error wraps volume.ErrStale if it has. The lock of a volume in a file makes this check unnecessary.
func (s *Storage) Confirm(ctx context.Context, id cloud.VolumeID, vm cloud.VMID, generation uint64) error {
	want := s.desired(id)
	if want.GetRbd() == nil {
		return fmt.Errorf("confirm the attachment of volume %s: %w", id, errNoKey)
	}
	p, err := s.ceph.pool(want.GetRbd())
	if err != nil {
		return err
	}
	p = p.Registered(want.GetExternalImage())
	if err := p.Confirm(ctx, string(id), volume.Attachment{VM: string(vm), Generation: generation}); err != nil {
		return err
	}
	s.setUnconfirmed(id, false)
	return nil
}

var hostPath = regexp.MustCompile(`(^|[\s"'=(])/[^\s"':;,)]*`)

// maxBrief is the largest length of an error text for a tenant, in bytes.
const maxBrief = 300

// brief returns the text of an error for a tenant: one line, at most maxBrief bytes, without paths of the host.
func brief(err error) string {
	text := strings.Join(strings.Fields(err.Error()), " ")
	text = hostPath.ReplaceAllString(text, "${1}(file)")
	if len(text) > maxBrief {
		text = strings.ToValidUTF8(text[:maxBrief], "")
	}
	return text
}

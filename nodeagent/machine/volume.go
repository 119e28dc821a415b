package machine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// Volumes opens the volumes of the host for VMs. Package storage implements it.
type Volumes interface {
	// Open opens a volume for the disk of a VM. It returns an error if the volume is not attached to the VM as this
	// disk.
	Open(ctx context.Context, vm cloud.VMID, disk string, want *agentv1.AssignedVolume) (volume.Files, error)
	// Release is called when no process has the volume open for the VM any more. When it returns nil, everything that
	// the guest wrote is durable. A repeated call is allowed.
	Release(ctx context.Context, pool string, id cloud.VolumeID, vm cloud.VMID, generation uint64) error
	// Confirm is called after a process has opened the RBD image of a volume, and before the guest can write to it. The
	// error wraps volume.ErrStale if the attachment has ended meanwhile. The guest must then not get the image.
	Confirm(ctx context.Context, id cloud.VolumeID, vm cloud.VMID, generation uint64) error
	// OpenStandby, ConfirmStandby, Activate and TakeBack are the steps of a migration of the VM. See package storage.
	OpenStandby(ctx context.Context, vm cloud.VMID, disk string, want *agentv1.AssignedVolume) (volume.Files, error)
	ConfirmStandby(ctx context.Context, vm cloud.VMID, disk string, want *agentv1.AssignedVolume) error
	Activate(ctx context.Context, vm cloud.VMID, disk string, want *agentv1.AssignedVolume) error
	TakeBack(ctx context.Context, vm cloud.VMID, disk string, want *agentv1.AssignedVolume, from uint64) error
	// Key returns the key of an encrypted volume that a process of the VM has open. See package storage.
	Key(vm cloud.VMID, disk string, want *agentv1.AssignedVolume) ([]byte, error)
	// Flattened is called when QEMU has copied all of the volume's image into the volume. QEMU still has the volume
	// open for the VM. When Flattened returns nil, the volume is recorded as independent of its image.
	Flattened(ctx context.Context, pool string, id cloud.VolumeID, vm cloud.VMID, generation uint64) error
	// FlattenProgress is called while QEMU copies a volume's image. The parameter percent is the copied part of the
	// image. The parameter err is the error of the last attempt, or nil. FlattenProgress must not block.
	FlattenProgress(id cloud.VolumeID, percent uint32, err error)
}

// releaseWithin is the maximum time to flush the volumes of a VM.
const releaseWithin = 2 * time.Minute

var errNoVolumes = errors.New("this host does not offer volumes")

// openVolumes are the open volumes of a VM, by disk id.
type openVolumes map[string]openVolume

type openVolume struct {
	disk  qemu.Disk // with slot -1
	files volume.Files
}

// close closes the files. A QEMU process that received them has its own duplicates.
func (o openVolumes) close() {
	for _, one := range o {
		one.files.Close()
	}
}

func (o openVolumes) disks() (out []qemu.Disk) {
	for _, one := range o {
		out = append(out, one.disk)
	}
	return out
}

// addTo replaces the disks of a spec that are volumes by those of o, and adds their files to files.
func (o openVolumes) addTo(s *qemu.Spec, files map[string]qemu.Layers) {
	for i, d := range s.Disks {
		if one, ok := o[d.ID]; ok {
			s.Disks[i], files[d.ID] = one.disk, one.layers()
		}
	}
}

func (o openVolume) layers() qemu.Layers {
	layers := qemu.Layers{Overlay: o.files.Content, Base: o.files.Base, Size: o.files.Size, Keys: qemu.Keys{Key: o.files.Key}}
	if o.files.RBD != nil {
		layers.User = qemu.Key(o.files.RBD.Key)
	}
	return layers
}

// openVolumes opens all volumes of an assigned VM. If one of them cannot be opened, it closes and releases the others.
func (v *VM) openVolumes(ctx context.Context, want *agentv1.AssignedVm) (openVolumes, error) {
	out := openVolumes{}
	for i, d := range want.GetDisks() {
		if d.GetVolume() == nil {
			continue
		}
		one, err := v.openVolume(ctx, want, i)
		if err != nil {
			out.close()
			return nil, errors.Join(err, v.releaseVolumes(ctx, out.disks()))
		}
		out[d.GetId()] = one
	}
	return out, nil
}

// openVolume opens the volume of the disk at index i of an assigned VM.
func (v *VM) openVolume(ctx context.Context, want *agentv1.AssignedVm, i int) (openVolume, error) {
	d := want.GetDisks()[i]
	if v.set.o.Volumes == nil {
		return openVolume{}, errNoVolumes
	}
	files, err := v.set.o.Volumes.Open(ctx, v.id, d.GetId(), d.GetVolume())
	if err != nil {
		return openVolume{}, fmt.Errorf("disk %s: %w", d.GetId(), err)
	}
	out := openVolume{disk: v.set.spec(want).Disks[i], files: files}
	out.disk.Format, out.disk.Base, out.disk.Encrypted = files.Format, files.BaseFormat, files.Encrypted
	if i := files.RBD; i != nil {
		out.disk.RBD = &qemu.RBDImage{Monitors: i.Monitors, Pool: i.Pool, Image: i.Image, User: i.User}
	}
	if files.Format != qcow2.QCOW2 { // A QCOW2 file is grown only by ResizeDisk.
		out.disk.Size = files.Size
	}
	return out, nil
}

// confirmVolumes checks that the attachments of the VM's RBD images, which a new process has opened, have not ended
// meanwhile. If one has ended, another VM may use the image, so confirmVolumes kills the process.
func (v *VM) confirmVolumes(ctx context.Context) error {
	for _, d := range v.process.Record().Spec.Disks {
		if d.RBD == nil {
			continue
		}
		err := errNoVolumes
		if v.set.o.Volumes != nil {
			err = v.set.o.Volumes.Confirm(ctx, cloud.VolumeID(d.Volume), v.id, d.Generation)
		}
		if errors.Is(err, volume.ErrStale) {
			err = errors.Join(err, v.process.Kill(ctx))
		}
		if err != nil {
			return fmt.Errorf("disk %s: %w", d.ID, err)
		}
	}
	return nil
}

// releaseVolumes flushes volumes that no process has open any more.
func (v *VM) releaseVolumes(ctx context.Context, disks []qemu.Disk) error {
	if len(disks) == 0 {
		return nil
	}
	if v.set.o.Volumes == nil {
		return errNoVolumes
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseWithin)
	defer cancel()
	var errs []error
	for _, d := range disks {
		if d.Standby { // The process has not written to the volume. The host of the VM releases it.
			continue
		}
		err := v.set.o.Volumes.Release(ctx, d.Pool, cloud.VolumeID(d.Volume), v.id, d.Generation)
		if err != nil {
			errs = append(errs, fmt.Errorf("disk %s: %w", d.ID, err))
		}
	}
	return errors.Join(errs...)
}

// lastVolumes returns the volumes in the record of the VM's last start. The record includes every volume that the
// process may have had open.
func (v *VM) lastVolumes() (out []qemu.Disk, err error) {
	if v.home == nil {
		return nil, nil
	}
	last, err := v.home.Record()
	if errors.Is(err, qemu.ErrNotStarted) {
		return nil, nil
	}
	for _, d := range last.Spec.Disks {
		if d.Volume != "" {
			out = append(out, d)
		}
	}
	return out, err
}

// diskChange is a change of the volumes of a guest.
type diskChange struct {
	action Action // PlugDisk, UnplugDisk, ResizeDisk, FlattenDisk or TakeBackDisk
	disk   string // id of the disk
}

// diskChanges returns the changes that make the volumes have of a process those of the desired state want. If a disk
// differs in its volume, attachment generation or bus, it is removed, and a later plan attaches it again. A disk that
// is in the record but has no device in QEMU is also removed first, because QEMU may have its files open. Another cache
// mode or limit causes no change: it takes effect at the next start.
func diskChanges(want *agentv1.AssignedVm, have []qemu.AttachedDisk) []diskChange {
	var out []diskChange
	for _, h := range have {
		at, err := findVolume(want, h.ID)
		if err != nil {
			out = append(out, diskChange{UnplugDisk, h.ID})
			continue
		}
		w := want.GetDisks()[at]
		switch {
		case w.GetVolume().GetStandby() || h.Standby: // A migration of the VM decides which host has the volume.
		case w.GetVolume().GetVolumeId() == h.Volume && takesBack(w.GetVolume(), h.Disk):
			out = append(out, diskChange{TakeBackDisk, h.ID})
		case !h.Present || w.GetVolume().GetVolumeId() != h.Volume || buses[w.GetBus()] != h.Bus ||
			w.GetVolume().GetAttachmentGeneration() != h.Generation:
			out = append(out, diskChange{UnplugDisk, h.ID})
		case h.Size > 0 && h.Size < w.GetVolume().GetSizeBytes():
			out = append(out, diskChange{ResizeDisk, h.ID})
		case needsFlatten(w.GetVolume(), h):
			out = append(out, diskChange{FlattenDisk, h.ID})
		}
	}
	for _, w := range want.GetDisks() {
		attached := slices.ContainsFunc(have, func(h qemu.AttachedDisk) bool { return h.ID == w.GetId() })
		if w.GetVolume() != nil && !attached {
			out = append(out, diskChange{PlugDisk, w.GetId()})
		}
	}
	return out
}

// changesOfDisks returns the changes of the volumes, and those of the other disks (see growths).
func changesOfDisks(want *agentv1.AssignedVm, o Observation) []diskChange {
	return append(diskChanges(want, o.Volumes), growths(want, o.Sizes)...)
}

// nextDiskChange returns the change that follows the one of the disk last. A disk whose change fails repeatedly
// therefore does not block the others. The parameter changes must not be empty.
func nextDiskChange(changes []diskChange, last string) diskChange {
	at := slices.IndexFunc(changes, func(c diskChange) bool { return c.disk == last })
	return changes[(at+1)%len(changes)]
}

// resizeOf returns the id of the first disk that must be resized, or "".
func resizeOf(changes []diskChange) string {
	for _, c := range changes {
		if c.action == ResizeDisk {
			return c.disk
		}
	}
	return ""
}

// changeDisk executes PlugDisk, UnplugDisk, ResizeDisk, FlattenDisk or TakeBackDisk for a disk, and records a failure for
// reportDisks.
func (v *VM) changeDisk(ctx context.Context, a Action, id string, want *agentv1.AssignedVm) error {
	v.lastDisk = id
	var err error
	switch a {
	case PlugDisk:
		err = v.plugDisk(ctx, id, want)
	case UnplugDisk:
		err = v.process.UnplugDisk(ctx, id, func(d qemu.Disk) error { return v.releaseVolumes(ctx, []qemu.Disk{d}) })
	case ResizeDisk:
		err = v.resizeDisk(ctx, id, want)
	case FlattenDisk:
		return v.flattenDisk(ctx, id)
	case TakeBackDisk:
		_, err := v.takeBackDisk(ctx, id, want)
		return err
	}
	if err == nil {
		if a != UnplugDisk { // Keep the failure of a PlugDisk: both actions alternate until one succeeds.
			delete(v.diskFailures, id)
		}
		return nil
	}
	final := errors.Is(err, qemu.ErrNoDiskSlot) || errors.Is(err, qemu.ErrNotPluggable) ||
		errors.Is(err, qemu.ErrInvalid) || errors.Is(err, qemu.ErrWrongKey) || errors.Is(err, qemu.ErrNoNetwork) ||
		errors.Is(err, errNoVolumes) || errors.Is(err, volume.ErrRefused) || errors.Is(err, volume.ErrForeignClient)
	v.diskFailures = addFailure(v.diskFailures, id, want.GetGeneration(), err, final)
	return err
}

// findVolume returns the index of a disk of an assigned VM that is a volume.
func findVolume(want *agentv1.AssignedVm, id string) (int, error) {
	at := slices.IndexFunc(want.GetDisks(), func(d *agentv1.AssignedDisk) bool {
		return d.GetId() == id && d.GetVolume() != nil
	})
	if at < 0 {
		return 0, fmt.Errorf("the VM has no volume as disk %s", id)
	}
	return at, nil
}

func (v *VM) plugDisk(ctx context.Context, id string, want *agentv1.AssignedVm) error {
	at, err := findVolume(want, id)
	if err != nil {
		return err
	}
	one, err := v.openVolume(ctx, want, at)
	if err != nil {
		return err
	}
	layers := one.layers()
	if d := one.disk; d.RBD != nil {
		layers.Confirm = func(ctx context.Context) error {
			return v.set.o.Volumes.Confirm(ctx, cloud.VolumeID(d.Volume), v.id, d.Generation)
		}
	}
	err = v.process.PlugDisk(ctx, one.disk, layers)
	one.files.Close()
	recorded := slices.ContainsFunc(v.process.Record().Spec.Disks, func(d qemu.Disk) bool { return d.ID == id })
	if err != nil && !recorded { // QEMU does not have the volume, and UnplugDisk would not find the disk.
		err = errors.Join(err, v.releaseVolumes(ctx, []qemu.Disk{one.disk}))
	}
	return err
}

func (v *VM) resizeDisk(ctx context.Context, id string, want *agentv1.AssignedVm) error {
	at := slices.IndexFunc(want.GetDisks(), func(d *agentv1.AssignedDisk) bool { return d.GetId() == id })
	if at < 0 {
		return fmt.Errorf("the VM has no disk %s", id)
	}
	d := want.GetDisks()[at]
	if d.GetVolume() != nil {
		return v.process.ResizeDisk(ctx, id, d.GetVolume().GetSizeBytes())
	}
	return v.process.ResizeDisk(ctx, id, d.GetSizeBytes())
}

// observeDisks updates v.volumes and v.sizes. If QEMU cannot be queried, every volume in the record counts as present.
func (v *VM) observeDisks(ctx context.Context) {
	v.volumes = nil
	v.observeSizes()
	for _, d := range v.process.Record().Spec.Disks {
		if d.Volume != "" {
			v.volumes = append(v.volumes, qemu.AttachedDisk{Disk: d, Present: true})
		}
	}
	if v.guest != Running && v.guest != Waiting || len(v.volumes) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, statusWithin)
	defer cancel()
	disks, err := v.process.Disks(ctx)
	switch {
	case err == nil:
		v.volumes = slices.DeleteFunc(disks, func(d qemu.AttachedDisk) bool { return d.Volume == "" })
		v.observeFlattening(time.Now())
	case v.guest == Running:
		v.guest, v.trouble = Unresponsive, "QEMU does not answer"
	}
}

// reportDisks returns the report of the VM's volumes: the volumes of its process, and the volumes of the desired state
// want that are not attached yet. A volume to be removed counts as attached until it is flushed.
func (v *VM) reportDisks(want *agentv1.AssignedVm) []cloud.DiskObservation {
	var out []cloud.DiskObservation
	if v.process == nil {
		for _, d := range v.unreleased {
			out = append(out, cloud.DiskObservation{ID: d.ID, Attached: true})
		}
		return out
	}
	pending := map[string]Action{}
	for _, c := range diskChanges(want, v.volumes) {
		if c.action != FlattenDisk && c.action != TakeBackDisk { // FlattenProgress reports flattening.
			pending[c.disk] = c.action
		}
	}
	report := func(id string, attached bool) {
		o := cloud.DiskObservation{ID: id, Attached: attached}
		if pending[id] != Nothing {
			o.Error = v.diskFailures[id].report(want.GetGeneration())
		}
		out = append(out, o)
	}
	for _, d := range v.volumes {
		_, err := findVolume(want, d.ID)
		report(d.ID, d.Present || err != nil)
	}
	for id, action := range pending {
		if action == PlugDisk {
			report(id, false)
		}
	}
	slices.SortFunc(out, func(a, b cloud.DiskObservation) int { return strings.Compare(a.ID, b.ID) })
	return out
}

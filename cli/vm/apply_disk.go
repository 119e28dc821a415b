package vm

import (
	"context"
	"slices"
	"strconv"

	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/apply"
	"github.com/trivet-cloud/trivet/cli/image"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	"github.com/trivet-cloud/trivet/cli/volume"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// newDisk is a disk of a file that the VM does not have.
type newDisk struct {
	disk
	imageID string
}

// allDisks compares the disks. A volume of the file is the disk that has this volume, and any other disk of the file is
// the disk with the same ID, which is by default its place in the file.
func (x *comparison) allDisks(ctx context.Context) error {
	disks, err := x.f.parseDisks()
	if err != nil {
		return err
	}
	var volumes []string // IDs of the volumes that the file names
	for _, d := range disks {
		if d.volume == "" {
			continue
		}
		id, err := x.volume(ctx, d)
		if err != nil {
			return err
		}
		volumes = append(volumes, id)
	}
	for _, d := range disks {
		if d.volume != "" {
			continue
		}
		have := diskOf(x.vm, d.id)
		switch id := have.GetSource().GetVolumeId(); {
		case have == nil:
			err = x.missingDisk(ctx, d)
		case id != "" && slices.Contains(volumes, id):
			err = session.Errorf(codes.FailedPrecondition, "give the disk of the file an id that no disk has",
				"%s is a volume that the file also lists", d.id)
		default:
			err = x.disk(ctx, d, have)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// volume compares an existing volume that the file names, and returns the ID of the volume.
func (x *comparison) volume(ctx context.Context, d disk) (string, error) {
	id, err := volume.Find(ctx, x.s, x.conn, d.volume)
	if err != nil {
		if x.run.WillExist(err, "volume", d.volume) {
			x.addDisk(newDisk{disk: d}, "volume "+d.volume+" attached")
			return "", nil
		}
		return "", err
	}
	for _, have := range x.vm.GetSpec().GetDisks() {
		if have.GetSource().GetVolumeId() != id {
			continue
		}
		if d.named && d.id != have.GetId() {
			return "", apply.Fixed("volume "+d.volume+": id", have.GetId(), d.id)
		}
		return id, x.device(d, have)
	}
	v, err := x.readVolume(ctx, id)
	if err != nil {
		return "", err
	}
	if v.GetAttachedToVm() != "" {
		return "", session.Errorf(codes.FailedPrecondition, "",
			"volume %s is attached to another VM: %s", d.volume, v.GetAttachedToVm())
	}
	x.addDisk(newDisk{disk: d}, "volume "+d.volume+" attached")
	return id, nil
}

// missingDisk adds a disk of the file that the VM does not have. It becomes a volume, as with `trivet vm disk attach`.
func (x *comparison) missingDisk(ctx context.Context, d disk) (err error) {
	n := newDisk{disk: d}
	if d.image != "" {
		if n.imageID, err = image.Find(ctx, x.s, x.conn, d.image); err != nil {
			return err
		}
		if d.sizeGiB == 0 {
			if n.sizeGiB, err = defaultSize(ctx, x.conn, x.t.org, n.imageID, 0); err != nil {
				return err
			}
		}
	}
	x.addDisk(n, d.id+" attached")
	return nil
}

func (x *comparison) addDisk(d newDisk, text string) {
	x.disks = append(x.disks, d)
	x.plan.Add("%s", text)
}

// disk compares a disk of the file with a disk of the VM that has the same ID.
func (x *comparison) disk(ctx context.Context, d disk, have *vmv1.DiskSpec) error {
	size := have.GetSizeGib()
	if id := have.GetSource().GetVolumeId(); id != "" {
		v, err := x.readVolume(ctx, id)
		if err != nil {
			return err
		}
		if size = v.GetSizeGib(); d.class != "" && d.class != v.GetStorageClass() {
			return apply.Fixed(d.id+": class", v.GetStorageClass(), d.class)
		}
	} else {
		if d.class != "" {
			return apply.Fixed(d.id+": class", "", d.class)
		}
		if err := x.fixedImage(ctx, d.id+": image", have.GetSource().GetImageId(), d.image); err != nil {
			return err
		}
	}
	if d.sizeGiB > size {
		x.grow(have, d.sizeGiB)
		x.plan.Add("%s: size %d -> %d GiB", d.id, size, d.sizeGiB)
	}
	if d.sizeGiB != 0 && d.sizeGiB < size {
		return session.Errorf(codes.FailedPrecondition, "",
			"%s: size cannot become smaller: it is %d GiB, and the file gives %d GiB", d.id, size, d.sizeGiB)
	}
	return x.device(d, have)
}

// grow adds a new size of a disk to the change of the VM, or of the volume that is the disk.
func (x *comparison) grow(have *vmv1.DiskSpec, gib uint64) {
	if id := have.GetSource().GetVolumeId(); id != "" {
		x.volumes = append(x.volumes, &vmv1.ResizeVolumeRequest{OrgId: x.t.org, ProjectId: x.t.project, VolumeId: id, SizeGib: gib})
		return
	}
	if x.to.diskSizes == nil {
		x.to.diskSizes = map[string]uint64{}
	}
	x.to.diskSizes[have.GetId()] = gib
}

// device compares the options of a disk that are given. None of them can be changed.
func (x *comparison) device(d disk, have *vmv1.DiskSpec) error {
	switch {
	case d.bus != 0 && d.bus != have.GetBus():
		return apply.Fixed(have.GetId()+": bus", show.Enum("DISK_BUS", have.GetBus()), show.Enum("DISK_BUS", d.bus))
	case d.cache != 0 && d.cache != have.GetCache():
		return apply.Fixed(have.GetId()+": cache", show.Enum("DISK_CACHE", have.GetCache()), show.Enum("DISK_CACHE", d.cache))
	case d.boot != 0 && d.boot != have.GetBootIndex():
		return apply.Fixed(have.GetId()+": boot-index", strconv.Itoa(int(have.GetBootIndex())), strconv.Itoa(int(d.boot)))
	}
	return nil
}

func (x *comparison) readVolume(ctx context.Context, id string) (*vmv1.Volume, error) {
	req := &vmv1.GetVolumeRequest{OrgId: x.t.org, ProjectId: x.t.project, VolumeId: id}
	return vmv1.NewVolumeServiceClient(x.conn).GetVolume(ctx, req)
}

// attach attaches a disk. It creates the volume of a disk with a storage class, and deletes it if the disk cannot be
// attached.
func (x *comparison) attach(ctx context.Context, d newDisk) error {
	if !d.named && diskOf(x.vm, d.id) != nil { // the place of a volume in the file can be the ID of another disk
		taken := slices.Clone(x.vm.GetSpec().GetDisks())
		for _, other := range x.disks {
			taken = append(taken, &vmv1.DiskSpec{Id: other.id})
		}
		d.id = freeDiskID(taken)
	}
	made := &newVolumes{s: x.s}
	id, err := made.volumeOf(ctx, x.conn, x.vm.GetName(), d.disk, d.imageID)
	if err != nil {
		return err
	}
	vm, err := x.t.attachDisk(ctx, x.s, x.vm.GetName(), d.spec(d.imageID, id))
	if err != nil {
		made.deleteAll(ctx)
		return err
	}
	x.vm = vm
	return nil
}

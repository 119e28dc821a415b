package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

const (
	// memoryMiB is the memory of each guest.
	memoryMiB = 192
	// hotPlugs is the number of disks that can be attached to a running guest.
	hotPlugs = 4
	project  = "default"
)

// site is the cloud of a run, and pairs of guests: one of Trivet, and one that was started by hand.
type site struct {
	*bench
	cloud   *onehost.Cloud
	images  lab.GuestImages
	cmdline string
	pairs   []*pair
	volumes atomic.Int64 // number of names that volumeName has returned
}

// pair is a guest of Trivet, and a guest whose QEMU was started by hand with the arguments of the first one. Both have
// one disk: a volume of 1 GiB, or a sparse raw file of this size.
type pair struct{ ours, hand *machine }

// newSite starts the cloud.
func newSite(ctx context.Context, b *bench) (_ *site, err error) {
	s := &site{bench: b}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.cmdline, err = onehost.Cmdline(b.guest); err != nil {
		return nil, err
	}
	if s.cloud, err = onehost.Start(ctx, filepath.Join(b.dir, "cloud"), b.bin); err != nil {
		return nil, err
	}
	if slices.Contains(b.parts, "rbd") {
		s.cloud.RBDHelper = b.rbdHelper
	}
	if err := s.cloud.StartAgent(ctx); err != nil {
		return nil, err
	}
	s.images, err = lab.ImportGuest(ctx, s.cloud.Trio, s.cloud.Admin, b.guest)
	return s, err
}

// close ends the guests and the cloud.
func (s *site) close() error {
	for _, p := range s.pairs {
		p.ours.close()
		p.hand.close()
	}
	if s.cloud == nil {
		return nil
	}
	return s.cloud.Close()
}

// pair returns the pair with this number from 0, and boots its guests if they do not run yet.
func (s *site) pair(ctx context.Context, number int) (*pair, error) {
	for len(s.pairs) <= number {
		p, err := s.boot(ctx, len(s.pairs))
		if err != nil {
			return nil, fmt.Errorf("boot guests %d: %w", len(s.pairs), err)
		}
		s.pairs = append(s.pairs, p)
	}
	return s.pairs[number], nil
}

func (s *site) boot(ctx context.Context, number int) (_ *pair, err error) {
	p := &pair{ours: &machine{}, hand: &machine{}}
	defer func() {
		if err != nil {
			p.ours.close()
			p.hand.close()
		}
	}()
	volume, err := s.createVolume(ctx, "")
	if err != nil {
		return nil, err
	}
	vm, err := s.cloud.Admin.VMs.CreateVm(ctx, &vmv1.CreateVmRequest{
		Name: "bench-" + strconv.Itoa(number), OrgId: onehost.Org, ProjectId: project,
		Spec: &vmv1.VmSpec{
			Memory: &vmv1.MemorySpec{SizeMib: memoryMiB}, Disks: []*vmv1.DiskSpec{diskOf("data", volume)},
			Boot: &vmv1.BootSpec{Kernel: s.images.Kernel, Initrd: s.images.Initrd, Cmdline: s.cmdline},
		},
	})
	if err != nil {
		return nil, err
	}
	if _, err := s.cloud.Admin.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: onehost.Org, ProjectId: project, VmId: vm.GetId()}); err != nil {
		return nil, err
	}
	if p.ours, err = openMachine(ctx, s.cloud, vm.GetId()); err != nil {
		return nil, err
	}
	p.ours.volume = volume
	record, err := s.cloud.Record(vm.GetId())
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(s.dir, "hand-"+strconv.Itoa(number))
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	disk := filepath.Join(dir, "data.raw")
	if err := makeRaw(disk, 1<<30); err != nil {
		return nil, err
	}
	p.hand, err = startByHand(ctx, &onehost.ByHand{
		Argv: onehost.Arguments(record.Argv, s.guest, s.cmdline), Dir: dir, Disks: []onehost.DiskFile{{Path: disk}},
	})
	report.Say("guests %d run", number)
	return p, err
}

// makeRaw makes a sparse file of size bytes.
func makeRaw(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(size), f.Close())
}

// createVolume creates a volume of 1 GiB, from an image unless it is "", and returns its ID.
func (s *site) createVolume(ctx context.Context, image string) (string, error) {
	return s.createVolumeOf(ctx, 1, image)
}

// createVolumeOf is like createVolume, for a volume of another size. Several goroutines may call it at once.
func (s *site) createVolumeOf(ctx context.Context, gib uint64, image string) (string, error) {
	v, err := s.cloud.Admin.Volumes.CreateVolume(ctx, &vmv1.CreateVolumeRequest{
		Name: s.volumeName(), OrgId: onehost.Org, ProjectId: project, SizeGib: gib, ImageId: image,
		Driver: vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_MANAGED,
	})
	return v.GetId(), err
}

// volumeName returns a name that no other volume of the run has.
func (s *site) volumeName() string { return "bench-" + strconv.FormatInt(s.volumes.Add(1), 10) }

// deleteVolume deletes a detached volume.
func (s *site) deleteVolume(ctx context.Context, volume string) error {
	_, err := s.cloud.Admin.Volumes.DeleteVolume(ctx, &vmv1.DeleteVolumeRequest{OrgId: onehost.Org, ProjectId: project, VolumeId: volume})
	return err
}

// diskOf returns a disk that is a volume, without the page cache of the host.
func diskOf(id, volume string) *vmv1.DiskSpec {
	return &vmv1.DiskSpec{
		Id: id, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: volume}},
		Cache: vmv1.DiskCache_DISK_CACHE_NONE,
	}
}

// attach attaches a volume to a running guest of Trivet, and waits until the guest has it.
func (s *site) attach(ctx context.Context, m *machine, id, volume string) error {
	_, err := s.cloud.Admin.VMs.AttachDisk(ctx, &vmv1.AttachDiskRequest{
		OrgId: onehost.Org, ProjectId: project, VmId: m.vm, Disk: diskOf(id, volume),
	})
	return err
}

// detach detaches a disk from a running guest of Trivet, and waits until the host has flushed it.
func (s *site) detach(ctx context.Context, m *machine, id string) error {
	_, err := s.cloud.Admin.VMs.DetachDisk(ctx, &vmv1.DetachDiskRequest{OrgId: onehost.Org, ProjectId: project, VmId: m.vm, DiskId: id})
	return err
}

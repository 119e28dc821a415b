package machine

import (
	"slices"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// Maps from values of agent.v1 to the equivalent values of packages qemu and qcow2. A value that is not in a map
// becomes "", which packages qemu and disk refuse.
var (
	buses = map[vmv1.DiskBus]qemu.Bus{
		vmv1.DiskBus_DISK_BUS_VIRTIO: qemu.Virtio, vmv1.DiskBus_DISK_BUS_SCSI: qemu.SCSI, vmv1.DiskBus_DISK_BUS_IDE: qemu.IDE,
		vmv1.DiskBus_DISK_BUS_SATA: qemu.SATA,
	}
	caches = map[vmv1.DiskCache]qemu.Cache{
		vmv1.DiskCache_DISK_CACHE_NONE: qemu.NoCache, vmv1.DiskCache_DISK_CACHE_WRITEBACK: qemu.Writeback,
		vmv1.DiskCache_DISK_CACHE_WRITETHROUGH: qemu.Writethrough,
	}
	formats = map[vmv1.ImageFormat]qcow2.Format{
		vmv1.ImageFormat_IMAGE_FORMAT_RAW: qcow2.Raw, vmv1.ImageFormat_IMAGE_FORMAT_QCOW2: qcow2.QCOW2,
	}
)

// spec returns the qemu.Spec with which this host starts an assigned VM. Each disk and network interface has
// the slot -1, so that package qemu chooses its slot.
func (set *MachineSet) spec(want *agentv1.AssignedVm) qemu.Spec {
	s := qemu.Spec{
		ID: want.GetVmId(), Machine: set.o.MachineType, Accel: set.o.Accel, CPUModel: want.GetCpuModel(), VCPUs: int(want.GetVcpus()),
		Sockets: int(want.GetSockets()), Cores: int(want.GetCoresPerSocket()), MemoryMiB: want.GetMemoryMib(), Hugepages: want.GetHugepages(), DedicatedCPUs: want.GetDedicatedCpus(),
		Kernel: want.GetKernel() != nil, Initrd: want.GetInitrd() != nil, Cmdline: want.GetCmdline(),
		UEFI: want.GetFirmware() == agentv1.Firmware_FIRMWARE_UEFI, SecureBoot: want.GetSecureBoot(), TPM: want.GetTpm(),
		Windows: want.GetOsType() == vmv1.OsType_OS_TYPE_WINDOWS, LocalTime: want.GetRtcLocalTime(),
		Display: true,
	}
	if want.GetCdrom() != nil {
		s.CDROM = qemu.SCSI
		if s.Windows { // Windows has no driver for virtio.
			s.CDROM = qemu.SATA
		}
	}
	if s.CPUModel == "" {
		s.CPUModel = set.o.CPUModel
	}
	for _, d := range ownDisks(want) {
		one := qemu.Disk{ID: d.GetId(), Bus: buses[d.GetBus()], Slot: -1, Cache: caches[d.GetCache()]}
		if d.GetImage() != nil {
			one.Base = formats[d.GetImage().GetFormat()]
		}
		if vol := d.GetVolume(); vol != nil { // openVolumes.addTo adds the formats
			one.Pool, one.Volume, one.Generation = vol.GetPool(), vol.GetVolumeId(), vol.GetAttachmentGeneration()
			one.IOPS, one.BytesPerSecond = vol.GetMaxIops(), vol.GetMaxBytesPerSecond()
		}
		s.Disks = append(s.Disks, one)
	}
	s.NICs, s.Seed = nics(want), want.GetSeed() != nil
	return s
}

// check returns an error if this host can never run the assigned VM.
func (set *MachineSet) check(want *agentv1.AssignedVm) error {
	s, err := set.spec(want).KeepSlots(qemu.Spec{})
	if err == nil {
		err = s.Validate()
	}
	if err == nil {
		err = set.o.QEMU.CheckHost(s)
	}
	return err
}

// ownDisks returns the disks with which a VM is started, in boot order: its rescue disk if it has one, then its other
// disks.
func ownDisks(want *agentv1.AssignedVm) []*agentv1.AssignedDisk {
	if want.GetRescue() == nil {
		return want.GetDisks()
	}
	return slices.Concat([]*agentv1.AssignedDisk{want.GetRescue()}, want.GetDisks())
}

// disks returns the disks of an assigned VM that are not volumes, as package disk describes them.
func disks(want *agentv1.AssignedVm) []disk.Disk {
	var out []disk.Disk
	for _, d := range want.GetDisks() {
		if d.GetVolume() == nil {
			out = append(out, diskOf(d))
		}
	}
	return out
}

func diskOf(d *agentv1.AssignedDisk) disk.Disk {
	one := disk.Disk{ID: d.GetId(), Size: d.GetSizeBytes()}
	if d.GetImage() != nil {
		img := image(d.GetImage())
		one.Image = &img
	}
	return one
}

func image(i *agentv1.AssignedImage) disk.Image {
	return disk.Image{SHA256: i.GetSha256(), Size: int64(i.GetSizeBytes()), Format: formats[i.GetFormat()]}
}

// images returns all images that a start of the assigned VM needs.
func images(want *agentv1.AssignedVm) []disk.Image {
	var out []disk.Image
	for _, d := range ownDisks(want) {
		if d.GetImage() != nil {
			out = append(out, image(d.GetImage()))
		}
	}
	for _, i := range []*agentv1.AssignedImage{want.GetKernel(), want.GetInitrd(), want.GetCdrom()} {
		if i != nil {
			out = append(out, image(i))
		}
	}
	return out
}

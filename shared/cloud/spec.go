package cloud

import (
	"regexp"

	"github.com/trivet-cloud/trivet/shared/fault"
)

type (
	Hypervisor   uint8
	DiskBus      uint8
	DiskCache    uint8
	NICModel     uint8
	Architecture uint8
	VolumeDriver uint8
)

const (
	HypervisorUnspecified Hypervisor = iota
	KVM
	MicroVM
	AltVMM
)

const (
	BusUnspecified DiskBus = iota
	BusVirtio
	BusSCSI
	BusIDE
	BusSATA
)

const (
	CacheUnspecified DiskCache = iota
	CacheNone
	CacheWriteback
	CacheWritethrough
)

const (
	ModelUnspecified NICModel = iota
	ModelVirtio
	ModelE1000
)

const (
	ArchUnspecified Architecture = iota
	X8664
	AArch64
)

// Spec is the configuration of a VM, as its tenant requested it.
type Spec struct {
	// CPU configures the processors; nil means one vCPU. Memory configures the memory; nil means DefaultMemory.
	// Normalize replaces nil by these values.
	CPU      *CPU
	Memory   *Memory
	Disks    []Disk `cbor:",omitempty"`
	Network  []NIC  `cbor:",omitempty"`
	Boot     Boot
	Security Security
}

type CPU struct {
	VCPUs          uint32
	CoresPerSocket uint32
	Sockets        uint32
	// Model is the name of a CPU model, one of those that the host reports. If it is empty, the VM has VM.BaselineCPU.
	Model string `cbor:",omitempty"`
}

type Memory struct {
	SizeMiB   uint64
	Hugepages bool
}

// Disk is a disk of a VM. Exactly one of the fields Image, Volume and Blank must be set. It determines the disk's
// initial content.
type Disk struct {
	ID    string
	Image ImageID `cbor:",omitempty"`
	// Volume is the ID of a volume. SizeGiB is then 0, because the volume has a size of its own.
	Volume    VolumeID `cbor:",omitempty"`
	Blank     bool
	SizeGiB   uint64
	Bus       DiskBus
	Cache     DiskCache
	BootIndex uint32

	// Change is the pending attachment or detachment of the disk. The API does not show this field.
	Change DeviceChange `cbor:",omitempty"`
}

// Boot configures direct kernel boot. Kernel and Initrd are IDs of images, never paths on the host. An empty Kernel
// means that the VM boots from its disks.
type Boot struct {
	Kernel  ImageID `cbor:",omitempty"`
	Initrd  ImageID `cbor:",omitempty"`
	Cmdline string  `cbor:",omitempty"`
}

type Security struct {
	SecureBoot bool
	TPM        bool
}

// NormalizeFor normalizes the spec of a VM with this metadata. If the guest is Windows, which has no drivers for
// virtio, unset buses of disks become SATA and unset models of NICs become e1000. Otherwise it is equal to Normalize.
func (s *Spec) NormalizeFor(metadata map[string]string) {
	if metadata[OSTypeKey] == "windows" {
		for i := range s.Disks {
			if d := &s.Disks[i]; d.Bus == BusUnspecified {
				d.Bus = BusSATA
			}
		}
		for i := range s.Network {
			if n := &s.Network[i]; n.Model == ModelUnspecified {
				n.Model = ModelE1000
			}
		}
	}
	s.Normalize()
}

// Normalize sets each unset field to the default that the wire contract defines. It changes no other field.
func (s *Spec) Normalize() {
	if s.CPU == nil {
		s.CPU = &CPU{VCPUs: 1}
	}
	cpu := *s.CPU
	switch {
	case cpu.VCPUs == 0 && cpu.Sockets == 0 && cpu.CoresPerSocket == 0:
		cpu.VCPUs = 1
	case cpu.VCPUs == 0:
		cpu.VCPUs = max(cpu.Sockets, 1) * max(cpu.CoresPerSocket, 1)
	}
	s.CPU = &cpu
	if s.Memory == nil {
		s.Memory = &Memory{SizeMiB: DefaultMemory}
	} else if s.Memory.SizeMiB == 0 {
		s.Memory = &Memory{SizeMiB: DefaultMemory, Hugepages: s.Memory.Hugepages}
	}
	for i := range s.Disks {
		d := &s.Disks[i]
		d.Normalize()
	}
	for i := range s.Network {
		if n := &s.Network[i]; n.Model == ModelUnspecified {
			n.Model = ModelVirtio
		}
	}
}

// Normalize sets the unset fields of a disk to their defaults.
func (d *Disk) Normalize() {
	if d.Bus == BusUnspecified {
		d.Bus = BusVirtio
	}
	if d.Cache == CacheUnspecified {
		d.Cache = CacheWriteback
	}
	if d.Volume != "" {
		d.SizeGiB = 0
	}
}

// Topology returns the number of sockets and of cores per socket. Their product is the number of vCPUs. A REST body has
// neither field, and according to the wire contract this means 1 × 1, whatever the number of vCPUs. Therefore Topology
// treats 1 × 1 as unset and returns one socket with all vCPUs as cores.
func (c *CPU) Topology() (sockets, cores uint32) {
	switch {
	case c.Sockets <= 1 && c.CoresPerSocket <= 1:
		return 1, c.VCPUs
	case c.Sockets == 0:
		return c.VCPUs / max(c.CoresPerSocket, 1), c.CoresPerSocket
	case c.CoresPerSocket == 0:
		return c.Sockets, c.VCPUs / c.Sockets
	}
	return c.Sockets, c.CoresPerSocket
}

var modelPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// Check returns an InvalidArgument fault that names the invalid field of a normalized spec. A spec that Check accepts
// can be placed on a host, but may use features that are not supported yet: see CheckSupported.
func (s *Spec) Check() error {
	if s.CPU.VCPUs < 1 || s.CPU.VCPUs > MaxVCPUs {
		return fault.Invalid("spec.cpu.vcpus", "must be 1 to %d, got %d", MaxVCPUs, s.CPU.VCPUs)
	}
	if s.CPU.Sockets > MaxVCPUs || s.CPU.CoresPerSocket > MaxVCPUs {
		return fault.Invalid("spec.cpu", "sockets and cores_per_socket must be at most %d", MaxVCPUs)
	}
	if sockets, cores := s.CPU.Topology(); sockets*cores != s.CPU.VCPUs {
		return fault.Invalid("spec.cpu", "sockets × cores_per_socket must equal vcpus: %d × %d is not %d",
			s.CPU.Sockets, s.CPU.CoresPerSocket, s.CPU.VCPUs)
	}
	if m := s.CPU.Model; m != "" && !modelPattern.MatchString(m) {
		return fault.Invalid("spec.cpu.cpu_model", "is not the name of a CPU model: want letters, digits and ._- only")
	}
	if s.Memory.SizeMiB < MinMemoryMiB || s.Memory.SizeMiB > MaxMemoryMiB {
		return fault.Invalid("spec.memory.size_mib", "must be %d to %d, got %d", MinMemoryMiB, MaxMemoryMiB, s.Memory.SizeMiB)
	}
	if s.Memory.Hugepages && s.Memory.SizeMiB%HugepageMiB != 0 {
		return fault.Invalid("spec.memory.size_mib", "must be a multiple of %d with huge pages, got %d", HugepageMiB, s.Memory.SizeMiB)
	}
	if err := s.checkDisks(); err != nil {
		return err
	}
	if err := s.checkNICs(); err != nil {
		return err
	}
	return s.Boot.check()
}

func (s *Spec) checkDisks() error {
	if len(s.Disks) > MaxDisks {
		return fault.Invalid("spec.disks", "at most %d, got %d", MaxDisks, len(s.Disks))
	}
	seen := map[string]bool{}
	volumes := map[VolumeID]bool{}
	perBus := map[DiskBus]int{}
	for i, d := range s.Disks {
		at := "spec.disks[" + d.label(i) + "]."
		if err := d.Check(at); err != nil {
			return err
		}
		if seen[d.ID] {
			return fault.Invalid(at+"id", "is used twice")
		}
		seen[d.ID] = true
		if d.Volume != "" && volumes[d.Volume] {
			return fault.Invalid(at+"source.volume_id", "is used twice")
		}
		volumes[d.Volume] = true
		perBus[d.Bus]++
	}
	for bus, most := range busSlots {
		if perBus[bus] > most {
			return fault.Invalid("spec.disks", "at most %d on one %s bus, got %d", most, bus, perBus[bus])
		}
	}
	return nil
}

// Check returns an InvalidArgument fault if a field of a normalized disk is invalid. The parameter at is the path of
// the disk in the request, with a final dot.
func (d *Disk) Check(at string) error {
	if err := CheckDeviceID(at+"id", d.ID); err != nil {
		return err
	}
	if d.ID == RescueDisk {
		return fault.Invalid(at+"id", "is reserved for the rescue disk")
	}
	sources := 0
	for _, given := range []bool{d.Image != "", d.Volume != "", d.Blank} {
		if given {
			sources++
		}
	}
	if sources != 1 {
		return fault.Invalid(at+"source", "must be exactly one of image_id, volume_id, blank")
	}
	if d.Image != "" {
		if err := CheckUUID(at+"source.image_id", string(d.Image)); err != nil {
			return err
		}
	}
	if d.Volume != "" {
		if err := CheckUUID(at+"source.volume_id", string(d.Volume)); err != nil {
			return err
		}
	}
	if d.Volume == "" && (d.SizeGiB < 1 || d.SizeGiB > MaxDiskGiB) {
		return fault.Invalid(at+"size_gib", "must be 1 to %d, got %d", MaxDiskGiB, d.SizeGiB)
	}
	if d.Bus > BusSATA {
		return fault.Invalid(at+"bus", "unknown value %d", d.Bus)
	}
	if d.Cache > CacheWritethrough {
		return fault.Invalid(at+"cache", "unknown value %d", d.Cache)
	}
	return nil
}

// busSlots contains the maximum number of disks that a VM can have on a bus. The chipset's AHCI controller has six
// ports, and the PIIX3 IDE controller has four.
var busSlots = map[DiskBus]int{BusIDE: 4, BusSATA: 6}

func (b DiskBus) String() string {
	return [...]string{"unspecified", "virtio", "scsi", "ide", "sata"}[min(b, BusSATA)]
}

// label returns a name for a disk in error messages: the disk's ID if it is valid, and otherwise the disk's index i.
func (d *Disk) label(i int) string {
	if devicePattern.MatchString(d.ID) {
		return d.ID
	}
	return itoa(i)
}

func (b *Boot) check() error {
	if b.Kernel == "" {
		if b.Initrd != "" {
			return fault.Invalid("spec.boot.initrd", "needs a kernel")
		}
		if b.Cmdline != "" {
			return fault.Invalid("spec.boot.cmdline", "needs a kernel")
		}
		return nil
	}
	if err := CheckUUID("spec.boot.kernel", string(b.Kernel)); err != nil {
		return fault.Invalid("spec.boot.kernel", "must be the id of an image, not a path")
	}
	if b.Initrd != "" {
		if err := CheckUUID("spec.boot.initrd", string(b.Initrd)); err != nil {
			return fault.Invalid("spec.boot.initrd", "must be the id of an image, not a path")
		}
	}
	if len(b.Cmdline) > MaxCmdline {
		return fault.Invalid("spec.boot.cmdline", "at most %d bytes, got %d", MaxCmdline, len(b.Cmdline))
	}
	for _, r := range b.Cmdline {
		if r < 0x20 || r > 0x7e {
			return fault.Invalid("spec.boot.cmdline", "must be printable ASCII")
		}
	}
	return nil
}

// Need returns the amount of a host's resources that a VM with this spec requires.
func (s *Spec) Need() Capacity {
	need := Capacity{VCPUs: s.CPU.VCPUs, MemoryMiB: s.Memory.SizeMiB}
	if s.Memory.Hugepages {
		need.MemoryMiB, need.HugepagesMiB = 0, s.Memory.SizeMiB
	}
	for _, d := range s.Disks {
		if d.Volume == "" {
			need.StorageGiB += d.SizeGiB
		}
	}
	return need
}

// Images returns the IDs of all images that the spec names as a disk's image, kernel or initrd. Each ID occurs once.
func (s *Spec) Images() []ImageID {
	var ids []ImageID
	add := func(id ImageID) {
		if id == "" {
			return
		}
		for _, have := range ids {
			if have == id {
				return
			}
		}
		ids = append(ids, id)
	}
	for _, d := range s.Disks {
		add(d.Image)
	}
	add(s.Boot.Kernel)
	add(s.Boot.Initrd)
	return ids
}

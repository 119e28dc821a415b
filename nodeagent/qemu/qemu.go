// Package qemu runs one guest in one QEMU process: the command line, the confined start, finding it again after the
// agent was restarted, control, and the reason of its end.
//
// It must not know assignments, generations' meaning, images' origin or the control plane: its caller says what is to
// run, as a [Spec], and hands in open files. It decides nothing that a user could have wished otherwise.
//
// # The parts
//
//   - [Spec] and [Argv]: what a guest consists of, and the pure function from it to QEMU's arguments.
//   - [Homes] and [Home]: a VM's directory on this host, with its uid. The directory is the memory: [Record] is written
//     before QEMU is started, so that an agent which is killed at any moment finds what it left.
//   - [Host]: what all guests of this host share. Host.Launch starts one, Host.Adopt takes over what runs.
//   - [Process]: a QEMU that runs, whoever started it.
//   - [LauncherMain]: the agent's program started once more, for the moment between the agent and QEMU, in which a
//     process gives away everything it does not need.
//
// # Confinement
//
// QEMU runs under a uid and gid that belong to its VM alone, without groups, capabilities or environment and with
// no_new_privs and an empty capability bounding set, under its own seccomp filter with everything denied, in a control
// group with limits, and in mount, network, IPC and UTS namespaces of its own. It sees its program, the host's libraries
// and firmware (read-only; see rootFS), four device nodes, and its kernel and initrd if it boots one; no /proc, no /sys, no
// network. Disks, sockets and logs reach it as open descriptors, and none of them grows beyond the file size limit of
// [Files.limit]; logs are bounded further by the agent. Its session is its own and its parent's death does not end it.
//
// # Decisions
//
//   - QEMU stays when its guest has powered itself off or panicked (-action shutdown=pause,panic=pause), so that the
//     reason can be read by an agent that was away. [Process] then writes it down ([Home.Exit]) and ends QEMU. An exit
//     without such a state is a crash, told with what the kernel and QEMU's standard error say.
//   - A kernel panic ends the VM as crashed even where the guest would reboot itself: the truth and the console say
//     why, and whether to start again is the restart policy's.
//   - On a disk error the guest is stopped, not told (werror=stop, rerror=stop); Cont goes on where it was.
//   - PCI addresses follow from a disk's slot on its bus, and slots are kept as long as a disk stays ([Spec.KeepSlots]):
//     a guest does not find its second disk elsewhere because the first was detached.
//   - cache NONE opens the overlay past the host's page cache, but never the image beneath: it is read-only, and many
//     VMs share it.
//   - The kernel's command line is passed by QMP before QEMU creates the machine (-preconfig, x-exit-preconfig),
//     because every user of the host can read arguments.
//   - 256 and more vCPUs need an interrupt remapping that the other accelerator lacks: KVM only.
//   - /dev/kvm is a node of the VM's own, owned by its uid, since QEMU 7.2 cannot be given a descriptor for it.
package qemu

import (
	"errors"
	"fmt"
	"regexp"
	"slices"

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

var (
	// ErrInvalid is wrapped by every refusal of a Spec. Trying again will not help.
	ErrInvalid = errors.New("VM cannot be run")

	// ErrRunning means that a process of the VM exists already: adopt it.
	ErrRunning = errors.New("VM has a process")

	// ErrNotStarted means that this host has no record of ever having started the VM.
	ErrNotStarted = errors.New("VM was never started here")
)

// Spec is a guest, complete but for its files. It is kept as JSON in the VM's record.
type Spec struct {
	ID           string `json:"id"`            // the VM's, a UUID; also the guest's SMBIOS UUID
	GenerationID string `json:"generation_id"` // a UUID that changes when the guest is cloned or restored; "" is ID
	Machine      string `json:"machine"`       // versioned, such as pc-q35-7.2: never an alias, which changes with QEMU
	Accel        Accel  `json:"accel"`
	CPUModel     string `json:"cpu_model"`
	VCPUs        int    `json:"vcpus"`   // 1 to 288
	Sockets      int    `json:"sockets"` // 0: as many as it takes, and one if Cores is 0 too
	Cores        int    `json:"cores"`   // per socket; 0: as many as it takes
	MemoryMiB    uint64 `json:"memory_mib"`
	Disks        []Disk `json:"disks"` // in boot order; at most 16
	Kernel       bool   `json:"kernel"`
	Initrd       bool   `json:"initrd"`  // only with Kernel
	Cmdline      string `json:"cmdline"` // only with Kernel; at most 2 KiB of printable ASCII
}

// Accel is how guest code runs.
type Accel string

const (
	KVM Accel = "kvm"
	TCG Accel = "tcg"
)

// Bus is what the guest sees a disk at.
type Bus string

const (
	Virtio Bus = "virtio" // virtio-blk, each at a PCIe root port of its own
	SCSI   Bus = "scsi"   // virtio-scsi
	IDE    Bus = "ide"    // a PIIX3 controller beside the chipset
	SATA   Bus = "sata"   // the chipset's AHCI
)

// slots is how many disks each bus takes.
var slots = map[Bus]int{Virtio: 16, SCSI: 16, IDE: 4, SATA: 6}

// Cache says when a guest's write is done.
type Cache string

const (
	NoCache      Cache = "none"         // the host's page cache is passed by; a flush is a flush
	Writeback    Cache = "writeback"    // in the host's page cache; a flush is a flush
	Writethrough Cache = "writethrough" // each write is flushed before it is done
)

// Disk is one disk: an overlay that is written, over an image or nothing.
type Disk struct {
	ID       string       `json:"id"` // also the first 20 characters of its serial number
	Bus      Bus          `json:"bus"`
	Slot     int          `json:"slot"` // on its bus, from 0; -1: the first that is free (see KeepSlots)
	Cache    Cache        `json:"cache"`
	Base     qcow2.Format `json:"base"` // of the image beneath; "" is a blank disk
	ReadOnly bool         `json:"read_only"`
}

// Limits, as the platform's.
const (
	maxVCPUs     = 288
	maxTCGVCPUs  = 255
	minMemoryMiB = 64
	maxMemoryMiB = 12 << 20
	maxDisks     = 16
	maxCmdline   = 2 << 10
	maxSerial    = 20 // what virtio-blk, IDE and SCSI show of a serial number
)

var (
	validUUID    = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
	validMachine = regexp.MustCompile(`^pc-q35-[0-9]{1,3}\.[0-9]{1,3}$`)
	validModel   = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)
	validDisk    = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)
	validCmdline = regexp.MustCompile(`^[ -~]*$`)
)

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}

// Validate refuses what QEMU must not be given, with an error that wraps [ErrInvalid]. It does not know which CPU
// models the host has: [Launcher.Launch] does.
func (s Spec) Validate() error {
	switch {
	case !validUUID.MatchString(s.ID):
		return invalid("the id %q is not a UUID", s.ID)
	case s.GenerationID != "" && !validUUID.MatchString(s.GenerationID):
		return invalid("the generation id %q is not a UUID", s.GenerationID)
	case !validMachine.MatchString(s.Machine):
		return invalid("the machine type %q is not a version of q35", s.Machine)
	case s.Accel != KVM && s.Accel != TCG:
		return invalid("the accelerator %q is not known", s.Accel)
	case !validModel.MatchString(s.CPUModel):
		return invalid("the CPU model %q is not a name", s.CPUModel)
	case s.VCPUs < 1 || s.VCPUs > maxVCPUs:
		return invalid("%d vCPUs are not within 1 to %d", s.VCPUs, maxVCPUs)
	case s.VCPUs > maxTCGVCPUs && s.Accel == TCG:
		return invalid("%d vCPUs need KVM; without it a VM has at most %d", s.VCPUs, maxTCGVCPUs)
	case s.Sockets < 0 || s.Cores < 0 || s.Sockets > maxVCPUs || s.Cores > maxVCPUs:
		return invalid("%d sockets of %d cores are not possible", s.Sockets, s.Cores)
	case s.MemoryMiB < minMemoryMiB || s.MemoryMiB > maxMemoryMiB:
		return invalid("%d MiB of memory are not within %d to %d", s.MemoryMiB, minMemoryMiB, maxMemoryMiB)
	case !s.Kernel && (s.Initrd || s.Cmdline != ""):
		return invalid("an initrd or a command line needs a kernel")
	case len(s.Cmdline) > maxCmdline:
		return invalid("the kernel's command line has %d bytes, more than %d", len(s.Cmdline), maxCmdline)
	case !validCmdline.MatchString(s.Cmdline):
		return invalid("the kernel's command line is not printable ASCII")
	case len(s.Disks) > maxDisks:
		return invalid("%d disks are more than %d", len(s.Disks), maxDisks)
	}
	if sockets, cores := s.topology(); sockets*cores != s.VCPUs {
		return invalid("%d sockets of %d cores are not %d vCPUs", sockets, cores, s.VCPUs)
	}
	ids, places := map[string]bool{}, map[string]bool{}
	for _, d := range s.Disks {
		if err := d.validate(); err != nil {
			return err
		}
		if ids[d.ID] || places[d.node()] {
			return invalid("disk %q is there twice, or in another's slot", d.ID)
		}
		ids[d.ID], places[d.node()] = true, true
	}
	return nil
}

func (d Disk) validate() error {
	switch {
	case !validDisk.MatchString(d.ID):
		return invalid("the disk id %q is not one", d.ID)
	case slots[d.Bus] == 0:
		return invalid("disk %s: the bus %q is not known", d.ID, d.Bus)
	case d.Slot < 0 || d.Slot >= slots[d.Bus]:
		return invalid("disk %s: the bus %s has slots 0 to %d, and not %d", d.ID, d.Bus, slots[d.Bus]-1, d.Slot)
	case d.Cache != NoCache && d.Cache != Writeback && d.Cache != Writethrough:
		return invalid("disk %s: the cache mode %q is not known", d.ID, d.Cache)
	case d.Base != "" && d.Base != qcow2.Raw && d.Base != qcow2.QCOW2:
		return invalid("disk %s: an image of format %q cannot lie beneath", d.ID, d.Base)
	case d.ReadOnly && (d.Bus == IDE || d.Bus == SATA):
		return invalid("disk %s: a hard disk at %s cannot be read-only", d.ID, d.Bus)
	}
	return nil
}

// node is the name of the disk's top block node, such as virtio0. It says the slot too.
func (d Disk) node() string { return fmt.Sprintf("%s%d", d.Bus, d.Slot) }

// topology fills in what is left to us.
func (s Spec) topology() (sockets, cores int) {
	switch {
	case s.Sockets == 0 && s.Cores == 0:
		return 1, s.VCPUs
	case s.Sockets == 0:
		return s.VCPUs / s.Cores, s.Cores
	case s.Cores == 0:
		return s.Sockets, s.VCPUs / s.Sockets
	}
	return s.Sockets, s.Cores
}

// KeepSlots gives every disk with slot -1 the slot that a disk of the same id and bus has in before, and the first
// free one if there is none. More disks than a bus takes is an error that wraps [ErrInvalid].
func (s Spec) KeepSlots(before []Disk) (Spec, error) {
	s.Disks = slices.Clone(s.Disks)
	taken := map[string]bool{}
	for i, d := range s.Disks {
		if d.Slot == -1 {
			at := slices.IndexFunc(before, func(b Disk) bool { return b.ID == d.ID && b.Bus == d.Bus })
			if at >= 0 {
				s.Disks[i].Slot = before[at].Slot
			}
		}
		taken[s.Disks[i].node()] = true
	}
	for i := range s.Disks {
		d := &s.Disks[i]
		if d.Slot != -1 {
			continue
		}
		for d.Slot = 0; taken[d.node()]; d.Slot++ {
			if d.Slot > maxDisks {
				break
			}
		}
		if max := slots[d.Bus]; max > 0 && d.Slot >= max {
			return Spec{}, invalid("disk %s: the bus %s takes %d disks", d.ID, d.Bus, max)
		}
		taken[d.node()] = true
	}
	return s, nil
}

// Overhead is how much memory, in bytes, the VM's process may need besides the guest's, for its control group's limit:
// code, device models, buffers of I/O under way, page tables; under TCG also translated code, which is bounded.
func (s Spec) Overhead() uint64 {
	n := uint64(256<<20) + uint64(s.VCPUs)*(8<<20) + s.MemoryMiB<<20/64
	if s.Accel == TCG {
		n += translated << 20
	}
	return n
}

// translated is the most that TCG may keep of translated code, in MiB. QEMU's own default is up to 1 GiB.
const translated = 256

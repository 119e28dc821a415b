// Package qemu runs one VM in one QEMU process: it builds the command line, starts QEMU confined, finds it again after
// a restart of the agent, controls it, and records why it ended.
//
// It does not depend on assignments, images or the control plane. The caller passes a [Spec] and open files. The
// package decides nothing that a user could want to configure.
//
// # Parts
//
//   - [Spec] and [Argv]: the description of a VM, and the pure function from it to QEMU's arguments.
//   - [Homes] and [Home]: a VM's directory on this host, and its uid. All state of the package is in this directory.
//     The [Record] is written before QEMU is started, so that an agent that is killed at any moment finds the process
//     again.
//   - [Launcher]: starts VMs (Launch) and finds running ones again after a restart of the agent (Adopt).
//   - [Process]: a running QEMU, started by this agent or by an earlier one.
//   - [LauncherMain]: the code of the launcher, the process that becomes QEMU by execve after it has dropped all
//     privileges. The launcher is the agent's own program, started with a hidden command.
//
// # Confinement
//
// QEMU runs under a uid and gid that belong to its VM alone, without groups, capabilities or environment, with
// no_new_privs and an empty capability bounding set, under its own seccomp filter with everything denied, in a control
// group with limits, and in its own mount, network, IPC and UTS namespaces. It sees its program, the host's libraries
// and firmware (read-only; see rootFS), four device nodes, a directory for the agent's sockets (read-only; see
// [Home.Sockets]), and its kernel and initrd if it boots one; no /proc, no /sys and, except on a host with RBD, no
// network. Disks, taps, sockets and logs are passed as open descriptors, and no file can grow beyond
// [Files.fileSizeLimit]; the agent limits the logs further. QEMU has its own session and outlives its parent process.
//
// # Decisions
//
//   - QEMU keeps running when the guest has powered itself off or panicked (-action shutdown=pause,panic=pause), so
//     that an agent that was not running at that time can still read the reason. [Process] then records it
//     ([Home.Exit]) and ends QEMU. If QEMU ends without such a state, the exit is a crash, with a text from the exit
//     status and QEMU's standard error.
//   - A kernel panic ends the VM as crashed even if the guest would reboot itself. The restart policy decides whether
//     to start the VM again, and its console log shows why the kernel panicked.
//   - On a disk error QEMU pauses the guest and does not report the error to it (werror=stop, rerror=stop).
//     [Process.Resume] repeats the request.
//   - A disk is attached to a running QEMU like a network interface: its files are passed over the monitor socket. The
//     record is written before QEMU gets a disk, and again after QEMU has closed the files of a removed disk. The disk
//     gets the same block nodes and device as a disk on the command line. Every VM has a SCSI controller, so that SCSI
//     disks can be attached.
//   - The I/O limits of a disk are a throttle group of QEMU, because the limits of control groups apply to block
//     devices and not to files.
//   - A disk's PCI address follows from its slot on its bus, and a disk keeps its slot ([Spec.KeepSlots]). So the
//     second disk keeps its address when the first one is detached.
//   - A network interface is a tap that the agent opens, without vhost: the host's kernel then has no code for a guest's
//     packets except that of the tap. The tap's device stays in the namespace of its network. QEMU has only its
//     descriptor, and its own network namespace stays empty. On a host with RBD (see [Launcher.RBD]), QEMU has the
//     network namespace of the agent instead.
//   - QEMU opens RBD images with librbd. QEMU connects to the Ceph cluster in its main thread, and executes no QMP
//     command until it is connected, so the connection has a timeout of 8 seconds.
//   - A tap is passed to a running QEMU over its monitor socket (SCM_RIGHTS, [qmp.Conn.SendFD]). The launcher is not
//     needed, because the monitor's client runs in the agent, which has the tap open.
//   - The network interfaces that a VM has are those that QEMU lists, not those in the record: an agent may end between a
//     change of the machine and that of the record. The record is changed first when an interface is added, and last when
//     one is removed, so that it contains the port of each open tap.
//   - [Process.CopyDisks] copies disks while the guest runs. QEMU has a job for each disk (blockdev-backup). One
//     transaction begins all jobs, so that all copies have the content of the same instant. The copy is a separate
//     file. The disk gets no further overlay, because an overlay would slow down reads and would have to be merged
//     later.
//   - After a restart, the agent cancels the copies that were begun before the restart, and thaws the guest, because no
//     caller of CopyDisks waits for these copies any more.
//   - While a copy begins, the guest's file systems are frozen if the guest agent (qemu-ga) answers in time. A file in
//     the VM's home exists while the guest may be frozen, so that an agent that has restarted knows that it must thaw
//     the guest.
//   - Cache mode NONE opens the overlay with O_DIRECT, but not the base image, which is read-only and shared by many
//     VMs.
//   - The kernel's command line is passed by QMP before QEMU creates the machine (-preconfig, x-exit-preconfig),
//     because every user of the host can read the arguments of a process.
//   - The keys of encrypted disks and RBD images are passed by QMP too, before QEMU creates the machine. The block
//     nodes of these disks are therefore added by QMP, and only their devices and descriptors are arguments. The secret
//     object with the key exists in QEMU only while QEMU opens the file. If the agent ends before it has passed the
//     keys, it ends this QEMU after its restart, because the keys are not stored on disk.
//   - The LUKS header of an encrypted disk is made by a QEMU without a machine ([Launcher.Format]), and not by the VM's
//     QEMU: making the header takes about 2 seconds, during which QEMU's main loop does not run. The result is a file
//     in memory, which the caller copies.
//   - The streams of a migration are sockets that are passed to QEMU over its monitor socket, because QEMU has no
//     network. The target's QEMU is started with the arguments of the source's QEMU, which [Process.Machine] describes,
//     and with -incoming defer.
//   - While the file `migrating` exists in the VM's home, the guest is stopped by a migration, and only ResumeMigrated
//     starts its CPUs. Without the file, a later agent would resume the guest like one that was stopped for a snapshot.
//   - 256 and more vCPUs need interrupt remapping, which TCG lacks, so they need KVM.
//   - The files of a UEFI firmware are passed to QEMU as descriptors: the code, which is a file of the host, and the
//     NVRAM of the VM.
//   - The TPM is emulated by a process of swtpm in the VM's control group. The process is confined like QEMU, but has
//     another uid and no network. It is started before QEMU and ends with QEMU. If it ends earlier, QEMU and the guest
//     continue without a TPM, because the guest may not need it any more. The next start of the VM has the TPM again,
//     with its state.
//   - A migration copies the NVRAM like a disk, because QEMU itself writes the NVRAM to the target's file only after the
//     switchover. QEMU gets the state of the TPM from swtpm, and sends it with the state of the devices. The target starts
//     a swtpm without a state. [Process.SyncFirmware] flushes both before the guest runs at the target.
//   - A CD-ROM drive is a SCSI device, or a SATA device for guests without drivers for virtio.
//   - /dev/kvm is a device node of the VM, owned by its uid, because QEMU 7.2 cannot use a descriptor for it.
package qemu

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
)

var (
	// ErrInvalid is wrapped by the errors for a Spec that cannot be run. Another attempt fails the same way.
	ErrInvalid = errors.New("VM cannot be run")

	// ErrRunning means that the VM has a process already. Call [Launcher.Adopt] instead.
	ErrRunning = errors.New("VM has a process")

	// ErrNotStarted means that this host has no record of a start of the VM.
	ErrNotStarted = errors.New("VM was never started here")
)

// Spec describes a VM, except for its files. It is stored as JSON in the VM's record.
type Spec struct {
	ID           string `json:"id"`            // id of the VM, a UUID; also the guest's SMBIOS UUID
	GenerationID string `json:"generation_id"` // a UUID that changes when the guest is cloned or restored; "" means ID
	Machine      string `json:"machine"`       // a versioned type such as pc-q35-7.2, not an alias, which changes with QEMU
	Accel        Accel  `json:"accel"`
	CPUModel     string `json:"cpu_model"`
	VCPUs        int    `json:"vcpus"`   // 1 to 288
	Sockets      int    `json:"sockets"` // 0 means VCPUs / Cores, or 1 if Cores is 0 too
	Cores        int    `json:"cores"`   // per socket; 0 means VCPUs / sockets
	MemoryMiB    uint64 `json:"memory_mib"`
	Hugepages    bool   `json:"hugepages,omitempty"` // the memory consists of huge pages of 2 MiB
	// DedicatedCPUs means that each vCPU runs on a CPU of the host that it does not share. CPUs are these CPUs, one for
	// each vCPU. If all are on one NUMA node, MemoryNode is this node, and otherwise nil. CPUs and MemoryNode belong to
	// the host, and not to the machine that the guest sees.
	DedicatedCPUs bool   `json:"dedicated_cpus,omitempty"`
	CPUs          []int  `json:"cpus,omitempty"`
	MemoryNode    *int   `json:"memory_node,omitempty"`
	Disks         []Disk `json:"disks"` // in boot order; at most 16
	Kernel        bool   `json:"kernel"`
	Initrd        bool   `json:"initrd"`                // only with Kernel
	Cmdline       string `json:"cmdline"`               // only with Kernel; at most 2 KiB of printable ASCII
	NICs          []NIC  `json:"nics,omitempty"`        // at most MaxNICs
	Seed          bool   `json:"seed,omitempty"`        // the VM has a seed, a small read-only disk that configures its guest
	UEFI          bool   `json:"uefi,omitempty"`        // the firmware is UEFI instead of BIOS
	SecureBoot    bool   `json:"secure_boot,omitempty"` // needs UEFI; not together with Kernel
	TPM           bool   `json:"tpm,omitempty"`         // the VM has a TPM 2.0
	CDROM         Bus    `json:"cdrom,omitempty"`       // SCSI or SATA: the VM has a CD-ROM drive on this bus
	Windows       bool   `json:"windows,omitempty"`     // the guest is Windows: see Spec.cpu and Spec.rtc
	LocalTime     bool   `json:"local_time,omitempty"`  // the guest's clock has the host's local time instead of UTC
	// DiskPorts and NICPorts are the numbers of PCIe root ports for disks and for network interfaces. 0 means that the
	// numbers follow from Disks and NICs. Process.Machine sets both fields, because the target of a migration needs the
	// same ports as the source.
	DiskPorts int `json:"disk_ports,omitempty"`
	NICPorts  int `json:"nic_ports,omitempty"`
	// CodeBytes and NVRAMBytes are the sizes of the firmware's code and of its NVRAM in bytes. Launch sets both fields. For
	// LaunchIncoming they are the sizes at the source, which the target must have too. 0 means any size.
	CodeBytes  int64 `json:"code_bytes,omitempty"`
	NVRAMBytes int64 `json:"nvram_bytes,omitempty"`
	// Display is true if the VM has a VGA adapter and a VNC server. Agents of earlier versions started VMs without.
	Display bool `json:"display,omitempty"`
}

// Accel is QEMU's accelerator.
type Accel string

const (
	KVM Accel = "kvm"
	TCG Accel = "tcg"
)

// Limits of a VM. The API of the control plane has the same limits.
const (
	maxVCPUs     = 288
	maxTCGVCPUs  = 255
	minMemoryMiB = 64
	maxMemoryMiB = 12 << 20
	hugepageMiB  = 2
	maxDisks     = 16
	maxCmdline   = 2 << 10
	maxNVRAM     = 16 << 20 // bytes
	maxSerial    = 20       // bytes of a serial number that virtio-blk, IDE and SCSI show
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

// Validate returns an error that wraps [ErrInvalid] if QEMU cannot or must not run s. [Launcher.Launch] also checks
// that the host offers the CPU model.
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
	case len(s.CPUs) > 0 && (!s.DedicatedCPUs || len(s.CPUs) != s.VCPUs):
		return invalid("%d dedicated CPUs for %d vCPUs", len(s.CPUs), s.VCPUs)
	case s.Hugepages && s.MemoryMiB%hugepageMiB != 0:
		return invalid("%d MiB of memory are not a multiple of %d, the size of a huge page", s.MemoryMiB, hugepageMiB)
	case !s.Kernel && (s.Initrd || s.Cmdline != ""):
		return invalid("an initrd or a command line needs a kernel")
	case len(s.Cmdline) > maxCmdline:
		return invalid("the kernel's command line has %d bytes, more than %d", len(s.Cmdline), maxCmdline)
	case !validCmdline.MatchString(s.Cmdline):
		return invalid("the kernel's command line is not printable ASCII")
	case s.SecureBoot && !s.UEFI:
		return invalid("secure boot needs UEFI")
	case s.SecureBoot && s.Kernel:
		return invalid("with secure boot the firmware loads the kernel, not the host")
	case s.CodeBytes < 0 || s.NVRAMBytes < 0 || s.NVRAMBytes > maxNVRAM:
		return invalid("the sizes of the firmware, %d and %d bytes, are not possible", s.CodeBytes, s.NVRAMBytes)
	case s.DiskPorts < 0 || s.DiskPorts > maxDisks+sparePorts || s.NICPorts < 0 || s.NICPorts > MaxNICs:
		return invalid("%d disk ports or %d NIC ports are too many", s.DiskPorts, s.NICPorts)
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
	if err := s.validateCDROM(); err != nil {
		return err
	}
	return validateNICs(s.NICs)
}

// topology returns the numbers of sockets and of cores per socket. If s.Sockets or s.Cores is 0, topology computes it
// from VCPUs and the other one. If both are 0, there is one socket.
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

// KeepSlots returns s with a slot for each disk and network interface. The parameter before is the Spec of the last
// start. A disk whose slot is -1 gets the slot that a disk with the same id and bus has there. If there is no such disk,
// it gets the first free slot of its bus. Network interfaces get their slots in the same way. The error wraps
// [ErrInvalid] if a bus has too many disks, or the VM too many network interfaces.
func (s Spec) KeepSlots(before Spec) (Spec, error) {
	var err error
	if s.NICs, err = keepNICSlots(s.NICs, before.NICs); err != nil {
		return Spec{}, err
	}
	s.Disks = slices.Clone(s.Disks)
	taken := map[string]bool{}
	if s.CDROM != "" {
		taken[Disk{Bus: s.CDROM, Slot: cdromSlot[s.CDROM]}.node()] = true
	}
	for i, d := range s.Disks {
		if d.Slot == -1 {
			at := slices.IndexFunc(before.Disks, func(b Disk) bool { return b.ID == d.ID && b.Bus == d.Bus })
			if at >= 0 && !taken[before.Disks[at].node()] {
				s.Disks[i].Slot = before.Disks[at].Slot
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
			return Spec{}, invalid("disk %s: the bus %s has room for only %d disks", d.ID, d.Bus, max)
		}
		taken[d.node()] = true
	}
	return s, nil
}

// Overhead returns how much memory, in bytes, QEMU may need in addition to the guest's memory: code, device models, I/O
// buffers, page tables, and under TCG translated code. The control group's memory limit includes it.
func (s Spec) Overhead() uint64 {
	n := uint64(256<<20) + uint64(s.VCPUs)*(8<<20) + s.MemoryMiB<<20/64
	if s.Accel == TCG {
		n += translated << 20
	}
	if s.Display {
		n += displayMemory
	}
	return n
}

// displayMemory is the memory in bytes of the display: 16 MiB of video memory, and for each of the 8 viewers that a VM
// can have a copy of the picture and an output buffer.
const displayMemory = (16 + 8*16) << 20

// translated is the size of TCG's buffer for translated code, in MiB. QEMU's default is up to 1 GiB.
const translated = 256

package cloud

import (
	"maps"
	"net/netip"
	"slices"
)

// VM is the record of a virtual machine.
type VM struct {
	ID         VMID
	Name       string
	Org        OrgID
	Project    ProjectID
	State      State
	Spec       Spec
	Status     Status
	Node       NodeID
	Hypervisor Hypervisor
	CreatedAt  Time
	UpdatedAt  Time
	CreatedBy  string
	Metadata   map[string]string
	Labels     map[string]string

	// Generation increases by 1 with every change of Desired. A host's report about an older generation is ignored.
	Generation uint64
	Desired    Desired `cbor:"Wish"`
	// Deadline is the time at which the leader ends a transient state with the event TimedOut. It is 0 in other states.
	Deadline Time
	// Restarts are the times of the VM's automatic restarts within the last RestartWindow.
	Restarts []Time
	// Disks are the disks as the host needs them, in boot order. They are derived from Spec.Disks when the VM is
	// created or its disks change.
	Disks []ResolvedDisk
	// Kernel and Initrd are the images of a direct kernel boot, or nil. They do not change after the VM was created.
	Kernel, Initrd *ImageRef
	// CDROM is the image in the CD-ROM drive, and Rescue is the rescue disk (see RescueKey). They are nil if the VM has
	// none. They are derived from the metadata, and change only while the VM is STOPPED.
	CDROM  *ImageRef     `cbor:",omitempty"`
	Rescue *ResolvedDisk `cbor:",omitempty"`
	// NICRefusal is the host's last refusal to attach or detach a NIC, or nil if NICs were changed after it.
	NICRefusal *NICRefusal `cbor:",omitempty"`
	// DiskRefusal is the host's last refusal to attach or detach a disk, or nil if disks were changed after it.
	DiskRefusal *DiskRefusal `cbor:",omitempty"`
	// Resize is the pending resize: the host has not reported yet that it has taken effect. It is nil if there is none.
	Resize *Resize `cbor:",omitempty"`
	// Recovery is set from the time at which the VM lost its host until the VM is as it should be on another host.
	Recovery *Recovery `cbor:",omitempty"`
	// History has the last changes of State, at most MaxHistory, the oldest first.
	History []Transition `cbor:",omitempty"`
	// BaselineCPU is the CPU model of a VM whose Spec requests none. It is chosen when the VM is placed (function
	// BaselineCPU), and kept, so that the guest sees the same CPU after each start. It is empty for a VM that was placed
	// before baselines were recorded; such a VM has the default model of its host.
	BaselineCPU string `cbor:",omitempty"`
	// Choice says why the VM was placed on its host. It is nil for a VM that was placed before choices were recorded.
	Choice *Choice `cbor:",omitempty"`
	// Migration is set while the VM is MIGRATING. LastMigration describes the last migration that has ended, or is nil.
	Migration     *Migration       `cbor:",omitempty"`
	LastMigration *MigrationResult `cbor:",omitempty"`
	// RolledBack is the last attempt of a migration that ended with the VM on its source after the switchover, or 0. The
	// source may have handed the guest over in this attempt, and must then continue it. Later attempts that end before
	// their switchover do not change RolledBack, because the source may not have continued the guest yet.
	RolledBack uint64 `cbor:",omitempty"`
}

// Desired is the desired state of a VM. The agent on the VM's host brings the VM into this state.
type Desired struct {
	On bool
	// StartAfterStop is true if a start was requested while the VM was STOPPING. The VM is then started when it has
	// stopped.
	StartAfterStop bool `cbor:"Again"`
	// GraceMS is the time, in milliseconds, for which a guest may shut down after the power button was pressed. After
	// it, the host powers the VM off. It is used only if On is false.
	GraceMS uint64
	// Starts, Reboots and Resets count the requests of each kind. If a count is greater than the number of requests
	// that the host has executed, the host executes the request.
	Starts, Reboots, Resets uint64
}

// ResolvedDisk is a disk of a VM with all values that a host needs to create it. Image is nil for a blank disk. If the
// disk is a volume, Volume is the volume's ID, Image is nil and SizeBytes is 0, because the record of the volume
// contains image and size.
type ResolvedDisk struct {
	ID        string
	SizeBytes uint64
	Bus       DiskBus
	Cache     DiskCache
	Image     *ImageRef
	Volume    VolumeID `cbor:",omitempty"`
}

// ImageRef identifies the content of an image by its SHA-256, and contains its size and format.
type ImageRef struct {
	ID        ImageID
	SHA256    string
	SizeBytes uint64
	Format    ImageFormat
}

// Status holds the values of the host's last report about a VM.
type Status struct {
	Actual      State
	PID         uint32
	StartedAt   Time
	Addresses   []string
	LastError   string
	StartsDone  uint64
	RebootsDone uint64
	ResetsDone  uint64
	// StopsWithLease is true if the host has confirmed that it powers the VM off when the host's lease ends.
	StopsWithLease bool `cbor:",omitempty"`
}

// Usage is the resource usage of a VM in the last report of its host. It is not stored: only the leader has it, in
// memory.
type Usage struct {
	CPUPercent                                 float64
	MemoryMiB                                  uint64
	DiskReadBytes, DiskWriteBytes              uint64
	NetworkReceivedBytes, NetworkTransmitBytes uint64
	// GuestAddresses are IP addresses that the guest's agent lists: see CheckedAddresses.
	GuestAddresses []string `cbor:",omitempty"`
}

// maxGuestAddresses is the maximum number of addresses of a guest that are kept.
const maxGuestAddresses = 64

// CheckedAddresses returns those addresses of a guest that are valid IP addresses, without zone and in their usual form,
// at most 64. Addresses of loopback, of multicast and of one link only are left out. A guest can list any addresses.
func CheckedAddresses(all []string) (out []string) {
	for _, text := range all {
		a, err := netip.ParseAddr(text)
		if a = a.WithZone("").Unmap(); err != nil || !a.IsGlobalUnicast() || slices.Contains(out, a.String()) {
			continue
		}
		if out = append(out, a.String()); len(out) == maxGuestAddresses {
			break
		}
	}
	return out
}

// Tenant returns the org and project that own the VM.
func (vm *VM) Tenant() Tenant { return Tenant{vm.Org, vm.Project} }

// Addresses returns the addresses of the VM: first those of its NICs' ports, then others that the host reported.
func (vm *VM) Addresses() (all []string) {
	for _, n := range vm.Spec.Network {
		all = append(all, n.Addresses()...)
	}
	for _, a := range vm.Status.Addresses {
		if !slices.Contains(all, a) {
			all = append(all, a)
		}
	}
	return all
}

// Unassigned returns those of the given addresses that no NIC of the VM has.
func (vm *VM) Unassigned(addresses []string) (out []string) {
	for _, a := range addresses {
		if !slices.ContainsFunc(vm.Spec.Network, func(n NIC) bool { return slices.Contains(n.Addresses(), a) }) {
			out = append(out, a)
		}
	}
	return out
}

// Merge returns a copy of the labels or metadata in have, with the pairs in change added or replaced. A pair with an
// empty value removes its key. Removal needs a special value, because proto3 cannot distinguish an empty map from none.
func Merge(have, change map[string]string) map[string]string {
	out := maps.Clone(have)
	for k, v := range change {
		switch {
		case v == "":
			delete(out, k)
		case out == nil:
			out = map[string]string{k: v}
		default:
			out[k] = v
		}
	}
	return out
}

// Observed is the current state of a VM as its host reports it. The numbers are those of agent.v1.
type Observed uint8

const (
	ObservedUnspecified Observed = iota
	ObservedAbsent
	ObservedBuilding
	ObservedBuilt
	ObservedLaunching
	ObservedRunning
	ObservedStopping
	ObservedBuildFailed
	ObservedEnded
)

// Exit is the reason why a VM's process ended. The numbers are those of agent.v1.
type Exit uint8

const (
	ExitUnspecified Exit = iota
	ExitGuest
	ExitRequested
	ExitFailed
)

// Observation is a host's report about one VM. Generation is the generation of the desired state that the host had
// received when it sent the report.
type Observation struct {
	VM         VMID
	Generation uint64
	Observed   Observed
	Exit       Exit
	PID        uint32
	StartedAt  Time
	Addresses  []string
	// NICs are the NICs that the running guest has, and those that could not be attached.
	NICs []NICObservation
	// Disks are the volumes that the running guest has, and those that could not be attached.
	Disks       []DiskObservation
	Usage       *Usage
	LastError   string
	StartsDone  uint64
	RebootsDone uint64
	ResetsDone  uint64
	// StopsWithLease is true if the host powers the VM off when the host's lease ends.
	StopsWithLease bool
	// LaunchGeneration is the generation of the desired state with which the VM's process was started. VCPUs and
	// MemoryMiB are the size of the process. They are 0 without a process, and from agents that do not report them.
	LaunchGeneration uint64
	VCPUs            uint32
	MemoryMiB        uint64
	// Migration is the host's report about a migration of the VM, or nil if the host has no record of one.
	Migration *MigrationObservation
}

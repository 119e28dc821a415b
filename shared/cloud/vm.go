package cloud

import "maps"

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

	// Generation increases with every change of Desired. Reports of the host about an older generation are ignored.
	Generation uint64
	Desired    Desired `cbor:"Wish"`
	// Deadline is the time at which the leader ends a transient state with TimedOut; 0 in other states.
	Deadline Time
	// Restarts are the times of automatic starts within the last RestartWindow.
	Restarts []Time
	// Disks are the disks that the host creates. They are resolved from Spec.Disks when the VM is created, and do not
	// change.
	Disks []ResolvedDisk
	// Kernel and Initrd are the images of a direct kernel boot, or nil. They do not change after the VM was created.
	Kernel, Initrd *ImageRef
}

// Desired is the desired state of a VM, which the agent on its host establishes.
type Desired struct {
	On bool
	// StartAfterStop means that the VM is started when it has stopped, because a start was requested while it was
	// STOPPING.
	StartAfterStop bool `cbor:"Again"`
	// GraceMS is the time in milliseconds between the power button and the hard power off, while On is false.
	GraceMS uint64
	// Starts, Reboots and Resets count the requests of each kind. The host executes a request when the count exceeds
	// the number that it has executed.
	Starts, Reboots, Resets uint64
}

// ResolvedDisk is a disk of a VM with all values that a host needs to create it. Image is nil for a blank disk.
type ResolvedDisk struct {
	ID        string
	SizeBytes uint64
	Bus       DiskBus
	Cache     DiskCache
	Image     *ImageRef
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
}

// Usage is a VM's resource usage in the host's last report. It is only in the leader's memory.
type Usage struct {
	CPUPercent                                 float64
	MemoryMiB                                  uint64
	DiskReadBytes, DiskWriteBytes              uint64
	NetworkReceivedBytes, NetworkTransmitBytes uint64
}

// Tenant returns the org and project that own the VM.
func (vm *VM) Tenant() Tenant { return Tenant{vm.Org, vm.Project} }

// Merge returns the labels or metadata have, changed by those in change. An empty value removes its key, because proto3
// cannot distinguish an empty map from none.
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
// received.
type Observation struct {
	VM          VMID
	Generation  uint64
	Observed    Observed
	Exit        Exit
	PID         uint32
	StartedAt   Time
	Addresses   []string
	Usage       *Usage
	LastError   string
	StartsDone  uint64
	RebootsDone uint64
	ResetsDone  uint64
}

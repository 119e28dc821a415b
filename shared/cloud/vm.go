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

	// Generation increases with every change of the desired state. Reports of an older generation are ignored.
	Generation uint64
	Desired    Desired `cbor:"Wish"`
	// Deadline is when the leader ends a transient state that has not ended by itself; 0 in other states.
	Deadline Time
	// Restarts are the times of automatic starts within the restart window.
	Restarts []Time
	// Disks are the disks that the host makes, fixed at creation.
	Disks []ResolvedDisk
	// Kernel and Initrd are the images of a direct boot, fixed at creation.
	Kernel, Initrd *ImageRef
}

// Desired is the desired state of a VM.
type Desired struct {
	On bool
	// StartAfterStop starts the VM once it has stopped: a start was requested while STOPPING.
	StartAfterStop bool `cbor:"Again"`
	// GraceMS is the time in milliseconds between the power button and the hard power off, while On is false.
	GraceMS uint64
	// Starts, Reboots and Resets count the requests; the host performs each number once.
	Starts, Reboots, Resets uint64
}

// ResolvedDisk is a disk with everything that a host needs to make it.
type ResolvedDisk struct {
	ID        string
	SizeBytes uint64
	Bus       DiskBus
	Cache     DiskCache
	Image     *ImageRef
}

// ImageRef identifies an image's content.
type ImageRef struct {
	ID        ImageID
	SHA256    string
	SizeBytes uint64
	Format    ImageFormat
}

// Status holds the values of the host's last report.
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

// Usage is a VM's resource usage. Only the leader holds it, in memory.
type Usage struct {
	CPUPercent                                 float64
	MemoryMiB                                  uint64
	DiskReadBytes, DiskWriteBytes              uint64
	NetworkReceivedBytes, NetworkTransmitBytes uint64
}

// Tenant returns the owner of the VM.
func (vm *VM) Tenant() Tenant { return Tenant{vm.Org, vm.Project} }

// Merge returns have with an update to labels or metadata applied. An empty value removes its key, since proto3 cannot
// distinguish an empty map from none.
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

// Observed is the current state of a VM as its host sees it. The numbers are those of agent.v1.
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

// Exit is the cause of the end of a VM's process. The numbers are those of agent.v1.
type Exit uint8

const (
	ExitUnspecified Exit = iota
	ExitGuest
	ExitRequested
	ExitFailed
)

// Observation is a host's report about one VM.
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

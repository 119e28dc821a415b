package cloud

import "maps"

// VM is a virtual machine as recorded.
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

	// Generation rises with every change of what the host should do. A report of an older one says nothing.
	Generation uint64
	Wish       Wish
	// Deadline settles a transient state that nobody ends; 0 for the others.
	Deadline Time
	// Restarts are the times of automatic starts within the restart window.
	Restarts []Time
	// Disks are what the host is to build, fixed at creation.
	Disks []BuiltDisk
	// Kernel and Initrd of a direct boot, fixed at creation.
	Kernel, Initrd *BuiltImage
}

// Wish is what the host should bring about.
type Wish struct {
	On bool
	// Again starts the VM once it has stopped: a start that was asked for while STOPPING.
	Again bool
	// GraceMS is the time between the power button and the cut, while On is false.
	GraceMS uint64
	// Starts, Reboots and Resets count what was asked for; the host does each number once.
	Starts, Reboots, Resets uint64
}

// BuiltDisk is a disk resolved to what a host needs to make it.
type BuiltDisk struct {
	ID        string
	SizeBytes uint64
	Bus       DiskBus
	Cache     DiskCache
	Image     *BuiltImage
}

// BuiltImage is an image resolved to its bytes.
type BuiltImage struct {
	ID        ImageID
	SHA256    string
	SizeBytes uint64
	Format    ImageFormat
}

// Status is what the host last said.
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

// Usage is what a VM uses. It is soft state of the leader.
type Usage struct {
	CPUPercent                                 float64
	MemoryMiB                                  uint64
	DiskReadBytes, DiskWriteBytes              uint64
	NetworkReceivedBytes, NetworkTransmitBytes uint64
}

// Tenant is whose the VM is.
func (vm *VM) Tenant() Tenant { return Tenant{vm.Org, vm.Project} }

// Merge applies an update to labels or metadata: an empty value removes its key, since proto3 cannot tell an empty map
// from none.
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

// Observed is a level: what a host sees of a VM. Numbers are agent.v1's.
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

// Exit says how a VM that was wanted on came to its end. Numbers are agent.v1's.
type Exit uint8

const (
	ExitUnspecified Exit = iota
	ExitGuest
	ExitAsked
	ExitFailed
)

// Observation is one report of one VM by its host.
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

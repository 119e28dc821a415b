package cloud

// State is the state of a VM in the control plane's records. The states are those of the wire contract.
type State uint8

const (
	Unspecified State = iota
	Pending
	Creating
	Stopped
	Starting
	Running
	Stopping
	Migrating
	Error
	Failed
	Deleted
)

func (s State) String() string {
	return [...]string{"UNSPECIFIED", "PENDING", "CREATING", "STOPPED", "STARTING", "RUNNING", "STOPPING", "MIGRATING",
		"ERROR", "FAILED", "DELETED"}[min(s, Deleted)]
}

// Variant returns the state's name in REST (docs/api.md, "REST: VMs").
func (s State) Variant() string {
	return [...]string{"Unspecified", "Pending", "Creating", "Stopped", "Starting", "Running", "Stopping", "Migrating",
		"Error", "Failed", "Deleted"}[min(s, Deleted)]
}

// Event is a cause of a state transition of a VM: an API call, a report of the VM's host, or a timeout.
type Event uint8

const (
	// Events that a call to the API causes:
	StartRequested Event = iota
	StopRequested
	PowerOffRequested
	DeleteRequested
	ForceDeleteRequested
	// Events that a report of the VM's host causes:
	Built
	BuildFailed
	Up
	LaunchFailed
	GuestOff
	Died
	Off
	// Events that the leader causes: VM.Deadline has passed, the VM's host is fenced, and a PENDING VM has got a host:
	TimedOut
	HostLost
	Placed
	// A call has begun a live migration, and the migration has ended:
	MigrateRequested
	MigrationEnded
	// The leader moves a STOPPED VM from a host that is drained:
	HostDrained
)

func (e Event) String() string {
	return [...]string{"start", "stop", "cut", "delete", "forced delete", "built", "build failed", "up", "launch failed",
		"guest off", "died", "off", "timed out", "recover", "place", "migrate", "end the migration of", "move"}[min(e, HostDrained)]
}

// next is the life cycle of a VM: the next state for each state and event. A transition without an entry is refused.
// The effects of transitions are in life.go. Its method enter continues from STOPPED or ERROR to STARTING at once if
// the VM is to run. A call that only changes what the VM should do later, such as a start in CREATING, does not change
// the state.
var next = map[State]map[Event]State{
	Pending: {
		StartRequested: Pending, StopRequested: Pending, PowerOffRequested: Pending,
		DeleteRequested: Deleted, ForceDeleteRequested: Deleted, Placed: Creating,
	},
	Creating: {
		StartRequested: Creating, StopRequested: Creating, PowerOffRequested: Creating,
		DeleteRequested: Deleted, ForceDeleteRequested: Deleted,
		Built: Stopped, BuildFailed: Failed, TimedOut: Error, HostLost: Pending,
	},
	Stopped: {
		StartRequested: Starting, StopRequested: Stopped, PowerOffRequested: Stopped,
		DeleteRequested: Deleted, ForceDeleteRequested: Deleted, HostLost: Pending, HostDrained: Pending,
	},
	Starting: {
		StartRequested: Starting, StopRequested: Stopping, PowerOffRequested: Stopping, ForceDeleteRequested: Deleted,
		Up: Running, LaunchFailed: Error, Died: Error, GuestOff: Stopped, TimedOut: Error, HostLost: Pending,
	},
	Running: {
		StartRequested: Running, StopRequested: Stopping, PowerOffRequested: Stopping, ForceDeleteRequested: Deleted,
		GuestOff: Stopped, Died: Error, HostLost: Pending, MigrateRequested: Migrating,
	},
	Stopping: {
		StartRequested: Stopping, StopRequested: Stopping, PowerOffRequested: Stopping, ForceDeleteRequested: Deleted,
		Off: Stopped, TimedOut: Error, HostLost: Pending,
	},
	Migrating: {
		StartRequested: Migrating, ForceDeleteRequested: Deleted, MigrationEnded: Running,
	},
	Error: {
		StartRequested: Starting, StopRequested: Stopping, PowerOffRequested: Stopping,
		DeleteRequested: Deleted, ForceDeleteRequested: Deleted,
		Built: Stopped, Up: Running, Off: Stopped, HostLost: Pending,
	},
	Failed: {
		DeleteRequested: Deleted, ForceDeleteRequested: Deleted,
	},
}

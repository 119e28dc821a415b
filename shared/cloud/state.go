package cloud

// State is what the control plane holds of a VM (the spec's part 3).
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

// Variant is the state's name on REST (the spec's part 2.4).
func (s State) Variant() string {
	return [...]string{"Unspecified", "Pending", "Creating", "Stopped", "Starting", "Running", "Stopping", "Migrating",
		"Error", "Failed", "Deleted"}[min(s, Deleted)]
}

// Event is what can happen to a VM: by a call, by its host's report, or by time.
type Event uint8

const (
	// By a call.
	StartAsked Event = iota
	StopAsked
	CutAsked
	DeleteAsked
	ForcedDeleteAsked
	// By the host.
	Built
	BuildFailed
	Up
	LaunchFailed
	GuestOff
	Died
	Off
	// By the leader.
	TimedOut
)

func (e Event) String() string {
	return [...]string{"start", "stop", "cut", "delete", "forced delete", "built", "build failed", "up", "launch failed",
		"guest off", "died", "off", "timed out"}[min(e, TimedOut)]
}

// next is the whole VM life cycle: a missing entry is a refused transition. What a transition does besides stands in
// life.go. A call that only changes what is wished for later (start in CREATING, say) stays in its state.
var next = map[State]map[Event]State{
	Pending: {
		StartAsked: Pending, StopAsked: Pending, CutAsked: Pending,
		DeleteAsked: Deleted, ForcedDeleteAsked: Deleted,
	},
	Creating: {
		StartAsked: Creating, StopAsked: Creating, CutAsked: Creating,
		DeleteAsked: Deleted, ForcedDeleteAsked: Deleted,
		Built: Stopped, BuildFailed: Failed, TimedOut: Error,
	},
	Stopped: {
		StartAsked: Starting, StopAsked: Stopped, CutAsked: Stopped,
		DeleteAsked: Deleted, ForcedDeleteAsked: Deleted,
	},
	Starting: {
		StartAsked: Starting, StopAsked: Stopping, CutAsked: Stopping, ForcedDeleteAsked: Deleted,
		Up: Running, LaunchFailed: Error, Died: Error, GuestOff: Stopped, TimedOut: Error,
	},
	Running: {
		StartAsked: Running, StopAsked: Stopping, CutAsked: Stopping, ForcedDeleteAsked: Deleted,
		GuestOff: Stopped, Died: Error,
	},
	Stopping: {
		StartAsked: Stopping, StopAsked: Stopping, CutAsked: Stopping, ForcedDeleteAsked: Deleted,
		Off: Stopped, TimedOut: Error,
	},
	Migrating: {
		StartAsked: Migrating,
	},
	Error: {
		StartAsked: Starting, StopAsked: Stopping, CutAsked: Stopping,
		DeleteAsked: Deleted, ForcedDeleteAsked: Deleted,
		Built: Stopped, Up: Running, Off: Stopped,
	},
	Failed: {
		DeleteAsked: Deleted, ForcedDeleteAsked: Deleted,
	},
}

package cloud

import "strings"

// MaxHistory is the maximum number of state changes in the record of a VM. Older changes are removed.
const MaxHistory = 10

// maxTransitionError is the maximum length of Transition.Error, in bytes.
const maxTransitionError = 200

// Transition is one change of the state of a VM. Its encoding is short, because every write of a VM's record contains
// all entries of VM.History.
type Transition struct {
	At Time `cbor:"1,keyasint"`
	// From and To are the states before and after the change, and Event is its cause.
	From  State `cbor:"2,keyasint"`
	To    State `cbor:"3,keyasint"`
	Event Event `cbor:"4,keyasint"`
	// Error is the error that the host reported with the change, or empty. It is cut to maxTransitionError bytes.
	Error string `cbor:"5,keyasint,omitempty"`
}

// recordTransition appends the change from the present state to the state to, unless they are equal, to vm.History. It
// makes a new slice, because copies of the VM share the old one.
func (vm *VM) recordTransition(to State, ev Event, now Time) {
	if to == vm.State {
		return
	}
	kept := vm.History[max(0, len(vm.History)-(MaxHistory-1)):]
	history := make([]Transition, len(kept), len(kept)+1)
	copy(history, kept)
	vm.History = append(history, Transition{At: now, From: vm.State, To: to, Event: ev})
}

// explainTransition sets the error of the last state change, if text is not empty. The caller must have called
// recordTransition for this change on the same copy of the VM, because explainTransition changes vm.History in place.
func (vm *VM) explainTransition(text string) {
	if n := len(vm.History); n > 0 && text != "" {
		if len(text) > maxTransitionError {
			text = strings.ToValidUTF8(text[:maxTransitionError], "") + " …"
		}
		vm.History[n-1].Error = text
	}
}

// causes holds the human-readable text for each event that changes the state of a VM. "it" in the texts is the VM.
var causes = map[Event]string{
	StartRequested:       "a call started it",
	StopRequested:        "a call stopped it",
	PowerOffRequested:    "a call powered it off",
	DeleteRequested:      "a call deleted it",
	ForceDeleteRequested: "a call deleted it by force",
	Built:                "its host has built it",
	BuildFailed:          "its host could not build it",
	Up:                   "its process runs",
	LaunchFailed:         "its process could not be started",
	GuestOff:             "the guest has shut down",
	Died:                 "its process has ended unexpectedly",
	Off:                  "its process has ended",
	TimedOut:             "its host did not finish in time",
	HostLost:             "its host is lost",
	Placed:               "it was placed on a host",
	MigrateRequested:     "its migration to another host began",
	MigrationEnded:       "its migration ended",
	HostDrained:          "its host is drained",
}

// Cause returns why the state changed, as a short sentence about the VM.
func (t *Transition) Cause() string {
	if text, ok := causes[t.Event]; ok {
		return text
	}
	return t.Event.String()
}

// Choice describes why a VM is on its host.
type Choice struct {
	At Time
	// Node is the chosen host.
	Node NodeID `cbor:",omitempty"`
	// Reason is the human-readable list of the rules by which the host was chosen.
	Reason string
}

package cloud

import "strings"

// MaxHistory is the number of state changes that the record of a VM keeps. Older ones are removed.
const MaxHistory = 10

// maxTransitionError is the maximum length of Transition.Error, in bytes.
const maxTransitionError = 200

// Transition is one change of the state of a VM. Its record is short, because each write of a VM has all of them.
type Transition struct {
	At Time `cbor:"1,keyasint"`
	// From and To are the states before and after the change, and Event is its cause.
	From  State `cbor:"2,keyasint"`
	To    State `cbor:"3,keyasint"`
	Event Event `cbor:"4,keyasint"`
	// Error is the error that the host reported with the change, or empty. A long one is cut.
	Error string `cbor:"5,keyasint,omitempty"`
}

// recordTransition adds the change to the state to, if that is another state, to vm.History. Copies of the VM keep
// their history.
func (vm *VM) recordTransition(to State, ev Event, now Time) {
	if to == vm.State {
		return
	}
	kept := vm.History[max(0, len(vm.History)-(MaxHistory-1)):]
	history := make([]Transition, len(kept), len(kept)+1)
	copy(history, kept)
	vm.History = append(history, Transition{At: now, From: vm.State, To: to, Event: ev})
}

// explainTransition sets the error of the last state change. The caller must have made this change in its present copy
// of the VM.
func (vm *VM) explainTransition(text string) {
	if n := len(vm.History); n > 0 && text != "" {
		if len(text) > maxTransitionError {
			text = strings.ToValidUTF8(text[:maxTransitionError], "") + " …"
		}
		vm.History[n-1].Error = text
	}
}

// causes holds the text for each event that changes the state of a VM, for people.
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
	// Reason has the rules by which the host was chosen, for people.
	Reason string
}

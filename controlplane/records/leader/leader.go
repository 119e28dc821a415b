// Package lead is what only the leader of the system group does: commands, which any member accepts and one carries out,
// and tasks, which run while a member leads.
//
// A command is a function with a name. Handle gives back the same function for use on any member: it runs here when this
// member leads, and travels to the leader (one hop, with the verified caller, deadline and request id) when it does not.
// A task is a loop over records that would do the same if started again from nothing. It knows no records.
package leader

import (
	"context"
	"errors"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// ErrNotLeader is returned by a command, or by a call to another member, that found out before any effect that the
// member does not lead. The command is tried again elsewhere.
var ErrNotLeader = errors.New("this member does not lead")

// ErrNotSent is returned by a Caller whose request cannot have reached the other member.
var ErrNotSent = errors.New("the call was not sent")

// RemoteError is a failure of the leader's own: what happened is known there, and is for the log.
type RemoteError struct{ Text string }

func (e *RemoteError) Error() string { return "on the leader: " + e.Text }

// Leadership is what consensus knows of who leads.
type Leadership interface {
	// Leader is the leading member, 0 when none is known, and its term.
	Leader() (member, term uint64)
	// Changed is closed at the next change of Leader. Ask for it before asking Leader.
	Changed() <-chan struct{}
}

// Caller sends a command to another member. Its errors are ErrNotLeader, ErrNotSent, a *fault.Fault of the command, or
// anything else when nobody knows whether the command took effect.
type Caller interface {
	Call(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller) ([]byte, error)
	// Open is Call for a command that answers with a stream; each piece goes to send.
	Open(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller, send func([]byte) error) error
}

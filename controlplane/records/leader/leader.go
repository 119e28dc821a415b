// Package leader lets the services of every member do some of their work on one member only: the leader of the raft
// group named system. It has two parts: commands, which any member may call and the leader runs, and tasks, which are
// loops that run while this member leads.
//
// # Commands
//
// A Command is a package-level variable of a service. It joins the name of the command, its mode, and the method that
// runs on the leader. By convention a method that any member may call is named Create, the variable createCommand, and
// the method that runs on the leader createOnLeader:
//
//	var createCommand = leader.NewCommand("vm.create", leader.Keyed, (*Service).createOnLeader)
//
//	func New(opts Options) *Service {
//		s := &Service{…}
//		leader.Register(opts.Commands, s, createCommand, …)
//		return s
//	}
//
//	func (s *Service) Create(ctx context.Context, …) (Created, error) {
//		return createCommand.Call(ctx, s.opts.Commands, createAsk{…})
//	}
//
//	func (s *Service) createOnLeader(ctx context.Context, q createAsk) (Created, error) { … }
//
// Names are sent between members of different versions, so the meaning of a name and the type of its request must not
// change. Each service registers its commands in one place. A Stream is a command that only reads and sends its
// response in pieces. An Exchange is a bidirectional Stream: it also receives pieces of data from its caller.
//
// # Forwarding
//
// Call runs the method directly if this member leads. Otherwise it sends the request, encoded as CBOR, to the leader
// with the verified caller and the deadline. There is one hop: a member that receives a command and does not lead
// refuses it with ErrNotLeader, and the member where the call began tries again. Call waits up to NoLeaderTime for a
// leader.
//
// # Modes
//
// If the connection breaks after the request was sent, the leader may or may not have run the command. The mode
// determines what Call does then:
//   - Once: Call does not send the command again. It returns a fault of kind Unavailable, because the outcome is
//     unknown.
//   - Repeatable: running the command twice has the effect of running it once, so Call sends it again, to the next
//     leader if there is a new one.
//   - Keyed: as Repeatable if the caller gave an idempotency key, else as Once. The command must store its response
//     under the key (store.Idempotent), so that a repeated request returns the first response.
//
// # Results when the leader is lost
//
//   - No leader for NoLeaderTime: a fault of kind Unavailable. The command has not run, unless Call was already
//     repeating it.
//   - The leader changed before it ran the command: no error. Call sends the command to the new leader.
//   - The leader was lost before it responded: the response of the repeated command. If the mode does not allow to
//     repeat the command, a fault of kind Unavailable: the outcome is unknown.
//   - The caller's context ended: the error of the context.
//   - A Stream or an Exchange is sent again only if the request did not reach the leader.
//
// # Gate
//
// SetGate installs a check that the leader makes before it runs a command, for calls of its own and for forwarded ones.
// It limits what one caller may make the cluster write. A command that it refuses does not run.
//
// # Tasks
//
// A Task is a loop over records, such as expiring or rebalancing them. Tasks runs each Task in its own goroutine while
// this member leads, once this member has applied every acknowledged write. A task must store all of its state in
// records, so that it can continue on another member. For other work of a leader, While calls a function in each term,
// and InTerm limits a context to one term.
//
// The package must not know records or services.
package leader

import (
	"context"
	"errors"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// ErrNotLeader is returned by a command, or by a call to another member, if that member does not lead. The command has
// had no effect, so Call sends it again.
var ErrNotLeader = errors.New("this member does not lead")

// ErrNotSent is returned by a Caller if the request cannot have reached the other member, so that sending it again is
// safe.
var ErrNotSent = errors.New("the call was not sent")

// RemoteError is an internal error of the leader that ran a command, as opposed to a fault.Fault. Text is the message
// of that error. It is for the log and must not be shown to users.
type RemoteError struct{ Text string }

func (e *RemoteError) Error() string { return "on the leader: " + e.Text }

// Leadership reports which member leads a raft group, as far as this member knows. The report may be outdated.
type Leadership interface {
	// Leader returns the ID of the leading member, or 0 if none is known, and the current term.
	Leader() (member, term uint64)
	// Changed returns a channel that is closed when the result of Leader changes next. Call Changed before Leader, so
	// that no change is missed.
	Changed() <-chan struct{}
}

// Caller sends a command to another member, with the user on whose behalf it runs. It returns ErrNotLeader, ErrNotSent,
// a *fault.Fault or *RemoteError of the command, or any other error if it is unknown whether the command took effect.
type Caller interface {
	Call(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller) ([]byte, error)
	// Open is Call for a Stream: it calls send with each piece of the response.
	Open(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller, send func([]byte) error) error
	// Exchange is Call for an Exchange: the command receives and sends pieces of data over the pipe.
	Exchange(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller, pipe Pipe) error
}

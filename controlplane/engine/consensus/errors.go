package consensus

import (
	"errors"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftlog"
)

// Sentinel errors. Test for them with errors.Is.
var (
	// ErrUncertain means that a proposal may or may not be applied, now or later: leadership was lost, its deadline has
	// passed, or the member stopped meanwhile. A retry must carry the same id.
	ErrUncertain = errors.New("the outcome of the proposal is not known")
	// ErrOverloaded means that a limit of queued work is reached; nothing was done.
	ErrOverloaded = errors.New("too much work is queued on this member")
	// ErrTooLarge means that a proposal is larger than Limits.ProposalBytes; nothing was done.
	ErrTooLarge = message.ErrTooLarge
	// ErrNoLeader means that no leader responded to a read within Limits.ReadTicks, or that no leader accepted a
	// proposal within Limits.ProposalTicks. The proposal was not applied and will not be.
	ErrNoLeader = errors.New("no leader answered in time")
	// ErrTransferFailed means that the target of a leadership transfer did not become the leader within two election
	// timeouts.
	ErrTransferFailed = errors.New("leadership was not transferred in time")
	// ErrAlone means that the leadership cannot be transferred because no other voter can be reached.
	ErrAlone = errors.New("no other member can be reached")
	// ErrStopped means that the member was closed. Unless the error also matches ErrUncertain, nothing was done.
	ErrStopped = errors.New("the member is stopped")
	// ErrDamaged means that this member's disk has other data than was written, or less than what the member has
	// acknowledged. The member must not take part with such a disk.
	ErrDamaged = raftlog.ErrDamaged
	// ErrNoGroup means that the group was not added to this host.
	ErrNoGroup = errors.New("this member does not hold the group")
)

// NotLeaderError is returned for a proposal on a member that does not lead the group. The proposal was not applied and
// will not be: a retry on another member is safe under any id.
type NotLeaderError struct {
	// Leader is the current leader as far as this member knows, or the target of a leadership transfer; 0 if unknown.
	Leader uint64
}

func (e *NotLeaderError) Error() string {
	if e.Leader == 0 {
		return "this member does not lead the group, and no leader is known"
	}
	return fmt.Sprintf("this member does not lead the group, member %d does", e.Leader)
}

// WipedError stops a member whose data directory is new although another member has recorded an earlier one. The votes
// and acknowledgements of the member are lost, so it must not vote again. See dirid.go.
type WipedError struct{ Member uint64 }

func (e *WipedError) Error() string {
	return fmt.Sprintf("member %d has no data, but the cluster remembers it: trivet cluster replace %d", e.Member, e.Member)
}

// raftPanic is the panic value with which raftLogger passes a fatal error of raft to Host.guard.
type raftPanic struct{ text string }

func (p *raftPanic) Error() string { return "raft: " + p.text }

// Is makes a raftPanic match ErrDamaged: raft panics when its stored state contradicts the messages that it receives.
func (p *raftPanic) Is(target error) bool { return target == ErrDamaged }

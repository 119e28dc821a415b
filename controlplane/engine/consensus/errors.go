package consensus

import (
	"errors"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftlog"
)

// Sentinels of proposals and reads. Test them with errors.Is.
var (
	// ErrUncertain says that a proposal may or may not be applied, now or later: leadership was lost, the time it was
	// given is over, or the member stopped while it was under way. A retry must carry the same id.
	ErrUncertain = errors.New("the outcome of the proposal is not known")
	// ErrOverloaded says that a bound on queued work is reached; nothing was done.
	ErrOverloaded = errors.New("too much work is queued on this member")
	// ErrTooLarge says that a proposal is larger than Limits.ProposalBytes; nothing was done.
	ErrTooLarge = message.ErrTooLarge
	// ErrNoLeader says that a read found no leader, or none that answered, within Limits.ReadTicks; or a proposal none
	// that took it within Limits.ProposalTicks: it was not applied and will not be.
	ErrNoLeader = errors.New("no leader answered in time")
	// ErrTransferFailed says that another member did not take the leadership within two election time-outs.
	ErrTransferFailed = errors.New("the leadership was not taken over in time")
	// ErrAlone says that there is nobody to take the leadership: no other voter can be reached.
	ErrAlone = errors.New("no other member can be reached")
	// ErrStopped says that the member was closed; what had not been proposed by then was not done.
	ErrStopped = errors.New("the member is stopped")
	// ErrDamaged is returned when this member's disk does not hold what was written, or less than what the member has
	// acknowledged. The member must not take part with such a disk.
	ErrDamaged = raftlog.ErrDamaged
	// ErrNoGroup says that this host does not hold the group.
	ErrNoGroup = errors.New("this member does not hold the group")
)

// NotLeaderError refuses a proposal on a member that does not lead the group. The proposal was not applied and will not
// be: a retry elsewhere is safe under any id.
type NotLeaderError struct {
	// Leader is the member believed to lead, or about to; 0 if none is known.
	Leader uint64
}

func (e *NotLeaderError) Error() string {
	if e.Leader == 0 {
		return "this member does not lead the group, and no leader is known"
	}
	return fmt.Sprintf("this member does not lead the group, member %d does", e.Leader)
}

// WipedError stops a member whose directory is empty although another member has promised to hear an earlier directory
// of it only: what it voted for and acknowledged is lost, so it must not vote again.
type WipedError struct{ Member uint64 }

func (e *WipedError) Error() string {
	return fmt.Sprintf("member %d has no data, but the cluster remembers it: trivet cluster replace %d", e.Member, e.Member)
}

// raftPanic carries what raft cannot survive from its logger to Host.guard.
type raftPanic struct{ text string }

func (p *raftPanic) Error() string { return "raft: " + p.text }

// Is says that what raft cannot survive is taken for ErrDamaged: its state contradicts what it hears.
func (p *raftPanic) Is(target error) bool { return target == ErrDamaged }

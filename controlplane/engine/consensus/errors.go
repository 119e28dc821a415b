package consensus

import (
	"errors"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftlog"
)

// Sentinel errors, for use with errors.Is.
var (
	// ErrUncertain means that it is unknown whether a proposal was or will be applied: leadership was lost, its
	// deadline has passed, or the member stopped meanwhile. A retry must carry the same ID.
	ErrUncertain = errors.New("the outcome of the proposal is not known")
	// ErrOverloaded means that too many calls or bytes are queued on this member. Nothing was done.
	ErrOverloaded = errors.New("too much work is queued on this member")
	// ErrTooLarge means that a proposal has more than Limits.ProposalBytes. Nothing was done.
	ErrTooLarge = message.ErrTooLarge
	// ErrNoLeader means that no leader responded to a read within Limits.ReadTicks, or that a proposal waited for a
	// leader for Limits.ProposalTicks. The proposal was not applied and will not be.
	ErrNoLeader = errors.New("no leader answered in time")
	// ErrTransferFailed means that a leadership transfer has failed, for example because the target did not become the
	// leader within two election timeouts.
	ErrTransferFailed = errors.New("leadership was not transferred in time")
	// ErrAlone means that the leadership cannot be transferred because no other voter can be reached.
	ErrAlone = errors.New("no other member can be reached")
	// ErrStopped means that the member was closed. If the error also matches ErrUncertain, the proposal may still be
	// applied; otherwise nothing was done.
	ErrStopped = errors.New("the member is stopped")
	// ErrDamaged means that this member's disk does not contain what was written to it, for example less than the
	// member has acknowledged to others. The member must not take part in its groups with such a disk.
	ErrDamaged = raftlog.ErrDamaged
	// ErrNoGroup means that the group was not added to this host.
	ErrNoGroup = errors.New("this member does not hold the group")
)

// NotLeaderError is returned for a proposal on a member that does not lead the group. The proposal was not applied and
// will not be, so the caller may propose it again on another member, with any ID.
type NotLeaderError struct {
	// Leader is the current leader as far as this member knows. During a leadership transfer it is the target. It is 0
	// if no leader is known.
	Leader uint64
}

func (e *NotLeaderError) Error() string {
	if e.Leader == 0 {
		return "this member does not lead the group, and no leader is known"
	}
	return fmt.Sprintf("this member does not lead the group, member %d does", e.Leader)
}

// WipedError stops a member that was started with a new data directory although another member has recorded an earlier
// one for it. The member's votes and acknowledgements were in the earlier directory, so it must not vote again. See
// dirid.go.
type WipedError struct{ Member uint64 }

func (e *WipedError) Error() string {
	return fmt.Sprintf("member %d has no data, but the cluster remembers it: trivet cluster replace %d", e.Member, e.Member)
}

// raftPanic is the value with which raftLogger panics when raft logs a fatal error. Host.guard recovers it.
type raftPanic struct{ text string }

func (p *raftPanic) Error() string { return "raft: " + p.text }

// Is makes a raftPanic match ErrDamaged. raft panics when its stored state contradicts the messages of other members,
// which means that the disk has lost data.
func (p *raftPanic) Is(target error) bool { return target == ErrDamaged }

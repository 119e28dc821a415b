package consensus

import (
	"fmt"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftlog"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// A member that lost its disk has forgotten what it voted for and acknowledged; were it to vote again, two leaders or a
// lost write could follow. So each directory has a birth, a random number, and each member listens to one birth of each
// other member, ever.
//
// A directory with no history takes no part (no tick, no vote, no append) until it is vouched for: every other member
// has answered that it listens to no birth of this member, and then, asked to record this one, that it does. What is
// recorded is synced before the answer leaves, is never replaced, and messages of another birth are dropped. If an
// answer names another birth the host ends with a WipedError.
//
// Two steps, because a member that is started with a wrong directory, or before the others are there, should not be
// remembered for it: nobody records anything before everybody was found to know nothing.
//
// What holds:
//   - After a crash between birth and vouching the member has the same birth, asks again, and gets the same answers.
//   - A vouched birth is recorded by every other member before its first message counts. So one member that still has its
//     disk is enough to refuse a wiped one, and of two wiped members neither gets back in, though each would vouch for the
//     other. Messages of the old birth that were still under way cannot count together with ones of a new birth.
//   - Members that are not vouched for answer, too: at the first start nobody is.
//
// What is left: if every member is wiped, nobody remembers, and what starts is a new cluster; so is a wiped cluster of
// one. A member that was wiped while its first vouching was half done may have to be replaced though it had done nothing.
type dirIDs struct {
	own     uint64
	vouched bool
	joined  bool              // made for a member that joins: nobody is asked, and only who knows it is heard
	known   map[uint64]uint64 // by member
	warned  map[uint64]uint64 // the last foreign birth logged, by member

	claim    bool // the second step
	answered map[uint64]bool
	nextAsk  uint64 // in ticks
}

// DirID is this directory's.
func (h *Host) DirID() uint64 { return h.dirIDs.own }

// Joined says that the directory was made for a member that joins (Options.Join).
func (h *Host) Joined() bool { return h.dirIDs.joined }

// openDirIDs reads this directory's birth, or makes it.
func (h *Host) openDirIDs() error {
	h.dirIDs = dirIDs{known: map[uint64]uint64{}, warned: map[uint64]uint64{}, answered: map[uint64]bool{}}
	d, found, err := h.engine.Directory()
	if err != nil {
		return err
	}
	if !found {
		if h.dirIDs.own, err = random(h.opts.Rand); err != nil {
			return err
		}
		h.dirIDs.vouched = len(h.opts.Members) <= 1
		h.dirIDs.joined = len(h.opts.Members) == 0
		return h.writeDirectory()
	}
	switch {
	case d.Member != h.opts.ID:
		return fmt.Errorf("this directory is of member %d, not of member %d", d.Member, h.opts.ID)
	case len(d.Members) > 0 && len(h.opts.Members) > 0 && !slices.Equal(d.Members, h.opts.Members):
		return fmt.Errorf("this directory was made for the members %d, not for %d", d.Members, h.opts.Members)
	}
	h.dirIDs.own, h.dirIDs.vouched = d.ID, d.Vouched
	h.opts.Members, h.dirIDs.joined = d.Members, len(d.Members) == 0
	h.dirIDs.known, err = h.engine.PeerDirIDs()
	return err
}

func (h *Host) writeDirectory() error {
	return h.engine.PutDirectory(raftlog.Directory{
		ID: h.dirIDs.own, Vouched: h.dirIDs.vouched, Member: h.opts.ID, Members: h.opts.Members,
	})
}

// recordDirID binds this member to one directory of another.
func (h *Host) recordDirID(member, dirID uint64) error {
	if err := h.engine.PutPeerDirID(member, dirID); err != nil {
		return err
	}
	h.dirIDs.known[member] = dirID
	return nil
}

// dirIDOf is the directory of a member that the group speaks to, 0 if it is not known.
func (g *Group) dirIDOf(member uint64) uint64 {
	if dirID, added := g.storage.Members().DirIDs[member]; added {
		return dirID
	}
	if dirID, spoke := g.guests[member]; spoke && !g.storage.Members().Has(member) {
		return dirID
	}
	return g.host.dirIDs.known[member]
}

// requestDirIDs asks those who have not answered yet, every election time-out.
func (h *Host) requestDirIDs() {
	if h.now < h.dirIDs.nextAsk {
		return
	}
	h.dirIDs.nextAsk = h.now + uint64(h.opts.ElectionTicks)
	for _, m := range h.opts.Members {
		if m != h.opts.ID && !h.dirIDs.answered[m] {
			h.opts.Transport.Send(message.Envelope{
				From: h.opts.ID, To: m, FromDirID: h.dirIDs.own, Kind: message.KindDirIDRequest, Claim: h.dirIDs.claim,
			})
		}
	}
}

// answerDirIDRequest tells a member which directory of it is listened to here, after recording a claim of the first.
func (h *Host) answerDirIDRequest(e message.Envelope) error {
	known := h.dirIDs.known[e.From]
	switch {
	case mutant.On(mutant.ForgetBirths):
		known = 0
		if e.Claim {
			known = e.FromDirID
		}
	case known == 0 && e.Claim:
		if err := h.recordDirID(e.From, e.FromDirID); err != nil {
			return h.fail(err)
		}
		known = e.FromDirID
	}
	h.opts.Transport.Send(message.Envelope{
		From: h.opts.ID, To: e.From, FromDirID: h.dirIDs.own, ToDirID: e.FromDirID, Kind: message.KindDirIDResponse,
		Claim: e.Claim, Known: known,
	})
	return nil
}

// handleDirIDResponse takes an answer. Answers to an earlier directory of this member, to another step, or from a directory that
// is not listened to, say nothing.
func (h *Host) handleDirIDResponse(e message.Envelope) error {
	b := &h.dirIDs
	known, foreign := b.known[e.From]
	if b.vouched || e.ToDirID != b.own || e.Claim != b.claim || foreign && known != e.FromDirID {
		return nil
	}
	if e.Known != b.own && (e.Known != 0 || b.claim) {
		return h.fail(&WipedError{h.opts.ID})
	}
	b.answered[e.From] = true
	if len(b.answered) < len(h.opts.Members)-1 {
		return nil
	}
	b.answered, b.nextAsk = map[uint64]bool{}, 0
	if !b.claim {
		b.claim = true
		h.requestDirIDs()
		return nil
	}
	b.vouched = true
	if err := h.writeDirectory(); err != nil {
		return h.fail(err)
	}
	h.opts.Log.Info("every member vouches for this empty directory; taking part")
	for _, g := range h.groups {
		g.start()
	}
	return nil
}

// accepts says whether a message of the group may count. A member that was added is bound to its directory by the change
// that added it; the first message of another that was never heard binds it. A member that is not of the group may be
// newer than what this one knows, unless it was removed.
func (g *Group) accepts(e message.Envelope) (bool, error) {
	h, b := g.host, &g.host.dirIDs
	if mutant.On(mutant.ForgetBirths) {
		return b.vouched, nil
	}
	if !b.vouched || e.ToDirID != b.own && (e.ToDirID != 0 || b.joined) {
		return false, nil
	}
	members := g.storage.Members()
	if members.Refuses(e.From, e.FromDirID) {
		if e.Kind != message.KindRemoved {
			g.sendRemoved(e)
		}
		return false, nil
	}
	known, ok := members.DirIDs[e.From]
	switch {
	case ok:
	case !members.Has(e.From) && len(members.Conf.GetVoters()) > 0:
		if g.guests == nil || len(g.guests) > raftconf.MaxRemoved {
			g.guests = map[uint64]uint64{}
		}
		g.guests[e.From] = e.FromDirID
		return true, nil
	default:
		known, ok = b.known[e.From]
	}
	if !ok {
		if err := h.recordDirID(e.From, e.FromDirID); err != nil {
			return false, h.fail(err)
		}
		return true, nil
	}
	if known != e.FromDirID && b.warned[e.From] != e.FromDirID {
		b.warned[e.From] = e.FromDirID
		h.opts.Log.Warn("dropping messages of a member whose directory is not the one known", "from", e.From)
	}
	return known == e.FromDirID, nil
}

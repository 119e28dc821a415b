package consensus

import (
	"fmt"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftlog"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// dirIDs holds the random ID of this host's data directory. It also holds the IDs that this host has recorded for the
// data directories of other members.
//
// A member that lost its disk has forgotten its votes and acknowledgements. If it voted again, one term could have two
// leaders, or an acknowledged write could be lost. So each data directory has a random ID, and each member accepts
// messages of another member only from one data directory, forever.
//
// A member with a new directory takes part only after two steps. Before that, its raft groups get no ticks and no
// messages.
//
//  1. It requests from every other member the directory ID that is recorded there for it. Each must respond that none
//     is.
//  2. It requests every other member to record its directory's ID. Each must respond that it has done so.
//
// A member stores the ID durably before it responds, and never replaces it. If a response contains the ID of another
// directory, the host stops with a WipedError. With only the second step, some members could record a directory that
// others refuse, if a member is started with a wrong directory, or before the others run.
//
// Guarantees:
//
//   - After a crash between the steps, the directory still has the same ID, and the same requests get the same
//     responses.
//   - Every other member has recorded the directory before the first message from it counts. So one member with an
//     intact disk suffices to refuse a wiped member. If two members were wiped, neither can take part again, though
//     each would accept the other. Delayed messages of an old directory never count together with those of a new one.
//   - A member responds to these requests before it takes part itself. Otherwise a new cluster could never start.
//
// Limits: if every member is wiped, the result is a new, empty cluster. The same holds for a cluster of one member. A
// member that was wiped between the two steps may have to be replaced although it had not voted.
type dirIDs struct {
	own     uint64
	vouched bool              // both steps are done: this member takes part
	joined  bool              // by Options.Join: no steps are needed; only envelopes to this directory ID count
	known   map[uint64]uint64 // the recorded directory ID of each other member
	warned  map[uint64]uint64 // the last refused directory ID that was logged, by member

	claim    bool            // the second step is under way
	answered map[uint64]bool // the members that have responded in this step
	nextAsk  uint64          // the tick at which the requests are sent again
}

// DirID returns the random ID of this host's data directory. Other members drop this member's envelopes if they come
// from a data directory with another ID.
func (h *Host) DirID() uint64 { return h.dirIDs.own }

// Joined reports whether the data directory was created with Options.Join.
func (h *Host) Joined() bool { return h.dirIDs.joined }

// openDirIDs reads the directory IDs that are stored in the data directory: its own and those of other members. In a
// new directory it first generates and stores a random ID. It returns an error if the directory was created for another
// member ID or another list of members.
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
		return fmt.Errorf("this data directory belongs to member %d, not to member %d", d.Member, h.opts.ID)
	case len(d.Members) > 0 && len(h.opts.Members) > 0 && !slices.Equal(d.Members, h.opts.Members):
		return fmt.Errorf("this data directory was created for the members %d, not for %d", d.Members, h.opts.Members)
	}
	h.dirIDs.own, h.dirIDs.vouched = d.ID, d.Vouched
	h.opts.Members, h.dirIDs.joined = d.Members, len(d.Members) == 0
	h.dirIDs.known, err = h.engine.PeerDirIDs()
	return err
}

// writeDirectory durably stores the identity of this data directory: its ID, whether this member may take part in its
// groups, and the member ID and list of members for which the directory was created.
func (h *Host) writeDirectory() error {
	return h.engine.PutDirectory(raftlog.Directory{
		ID: h.dirIDs.own, Vouched: h.dirIDs.vouched, Member: h.opts.ID, Members: h.opts.Members,
	})
}

// recordDirID durably stores the data-directory ID of another member. From then on, this member accepts messages of
// that member only from that directory.
func (h *Host) recordDirID(member, dirID uint64) error {
	if err := h.engine.PutPeerDirID(member, dirID); err != nil {
		return err
	}
	h.dirIDs.known[member] = dirID
	return nil
}

// dirIDOf returns the data-directory ID of the member to which the group addresses its envelopes. It returns 0 if the
// ID is not known.
func (g *Group) dirIDOf(member uint64) uint64 {
	if dirID, added := g.storage.Members().DirIDs[member]; added {
		return dirID
	}
	if dirID, spoke := g.unlisted[member]; spoke && !g.storage.Members().Has(member) {
		return dirID
	}
	return g.host.dirIDs.known[member]
}

// requestDirIDs sends a request about data-directory IDs to each member that has not yet responded in the current step.
// It sends them again every ElectionTicks.
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

// answerDirIDRequest responds to another member's request with the data-directory ID that is recorded here for the
// sender. If none is recorded, and the request is to record one (Envelope.Claim), it durably records the sender's ID
// before it responds.
func (h *Host) answerDirIDRequest(e message.Envelope) error {
	known := h.dirIDs.known[e.From]
	switch {
	case mutant.On(mutant.ForgetDirIDs):
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

// handleDirIDResponse counts a response, and begins the next step when all members have responded. If the sender has
// recorded a different directory for this member, it stops the host with a WipedError. It ignores a response that is
// addressed to an earlier directory of this member, that belongs to another step, or whose sender has another directory
// than the one recorded here.
func (h *Host) handleDirIDResponse(e message.Envelope) error {
	d := &h.dirIDs
	known, foreign := d.known[e.From]
	if d.vouched || e.ToDirID != d.own || e.Claim != d.claim || foreign && known != e.FromDirID {
		return nil
	}
	if e.Known != d.own && (e.Known != 0 || d.claim) {
		return h.fail(&WipedError{h.opts.ID})
	}
	d.answered[e.From] = true
	if len(d.answered) < len(h.opts.Members)-1 {
		return nil
	}
	d.answered, d.nextAsk = map[uint64]bool{}, 0
	if !d.claim {
		d.claim = true
		h.requestDirIDs()
		return nil
	}
	d.vouched = true
	if err := h.writeDirectory(); err != nil {
		return h.fail(err)
	}
	h.opts.Log.Info("every member has recorded this new data directory; this member takes part now")
	for _, g := range h.groups {
		g.start()
	}
	return nil
}

// accepts reports whether the group may process an envelope. This depends on the data-directory ID of the sender.
//
// If a membership change added the sender, the ID must be the one that the change named. If the sender belongs to the
// first configuration, the ID must be that of the sender's first envelope; this ID is recorded durably. If the sender
// was removed with this data directory, the envelope is dropped. Envelopes of other senders that are not in the group
// are accepted, because this member may not have applied the addition of the sender yet.
func (g *Group) accepts(e message.Envelope) (bool, error) {
	h, d := g.host, &g.host.dirIDs
	if mutant.On(mutant.ForgetDirIDs) {
		return d.vouched, nil
	}
	if !d.vouched || e.ToDirID != d.own && (e.ToDirID != 0 || d.joined) {
		return false, nil
	}
	members := g.storage.Members()
	if members.Refuses(e.From, e.FromDirID) && !mutant.On(mutant.HearRemoved) {
		if e.Kind != message.KindRemoved {
			g.sendRemoved(e)
		}
		return false, nil
	}
	known, ok := members.DirIDs[e.From]
	switch {
	case ok:
	case !members.Has(e.From) && len(members.Conf.GetVoters()) > 0:
		if g.unlisted == nil || len(g.unlisted) > raftconf.MaxRemoved {
			g.unlisted = map[uint64]uint64{}
		}
		g.unlisted[e.From] = e.FromDirID
		return true, nil
	default:
		known, ok = d.known[e.From]
	}
	if !ok {
		if err := h.recordDirID(e.From, e.FromDirID); err != nil {
			return false, h.fail(err)
		}
		return true, nil
	}
	if known != e.FromDirID && d.warned[e.From] != e.FromDirID {
		d.warned[e.From] = e.FromDirID
		h.opts.Log.Warn("dropping messages of a member whose data directory is not the recorded one", "from", e.From)
	}
	return known == e.FromDirID, nil
}

package message

import (
	"errors"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"
)

// peerTypes lists the types of raft messages that an envelope of KindRaft may contain. Of the other types, some are
// only for use within a host; proposals are sent with KindForward, and heartbeats with KindHeartbeats.
var peerTypes = map[raftpb.MessageType]bool{
	raftpb.MsgApp: true, raftpb.MsgAppResp: true, raftpb.MsgVote: true, raftpb.MsgVoteResp: true, raftpb.MsgSnap: true,
	raftpb.MsgTimeoutNow: true, raftpb.MsgReadIndex: true, raftpb.MsgReadIndexResp: true, raftpb.MsgPreVote: true, raftpb.MsgPreVoteResp: true,
}

// Check returns an error if the content of e violates something that raft assumes without checking, because such a
// message could make raft panic. It also returns an error for a forwarded proposal of more than proposalBytes bytes. To
// check one heartbeat of an envelope of KindHeartbeats, set e.Raft to that heartbeat, converted by Heartbeat.Message.
func (e *Envelope) Check(proposalBytes int) error {
	switch e.Kind {
	case KindForward:
		return e.checkForward(proposalBytes)
	case KindRefuse:
		return nil
	case KindHeartbeats:
		if e.Raft.GetTerm() == 0 {
			return errors.New("a heartbeat without a term")
		}
		return nil
	}
	m := e.Raft
	switch {
	case m == nil:
		return errors.New("no message")
	case m.GetFrom() != e.From || m.GetTo() != e.To:
		return fmt.Errorf("message from %d to %d in an envelope from %d to %d", m.GetFrom(), m.GetTo(), e.From, e.To)
	case !peerTypes[m.GetType()]:
		return fmt.Errorf("%s is not for peers", m.GetType())
	case m.GetTerm() == 0 && m.GetType() != raftpb.MsgReadIndex:
		return fmt.Errorf("%s without a term", m.GetType())
	}
	switch m.GetType() {
	case raftpb.MsgApp:
		for i, ent := range m.Entries {
			if ent.GetIndex() != m.GetIndex()+uint64(i)+1 || ent.GetTerm() < m.GetLogTerm() || ent.GetTerm() > m.GetTerm() {
				return fmt.Errorf("entry %d of term %d out of order", ent.GetIndex(), ent.GetTerm())
			}
		}
	case raftpb.MsgReadIndex, raftpb.MsgReadIndexResp:
		if len(m.Entries) != 1 {
			return fmt.Errorf("%s with %d entries", m.GetType(), len(m.Entries))
		}
	case raftpb.MsgSnap:
		if m.GetSnapshot().GetMetadata().GetIndex() == 0 || m.GetSnapshot().GetMetadata().GetConfState() == nil {
			return errors.New("snapshot without index or members")
		}
		if _, err := ParseSnapshot(m.GetSnapshot()); err != nil {
			return err
		}
	}
	return nil
}

// checkForward checks an envelope of KindForward. It returns an error if a required field is missing, or if checkEntry
// returns an error for one of the entries.
func (e *Envelope) checkForward(limit int) error {
	if e.Term == 0 || e.Life == 0 || e.Number == 0 || len(e.Payloads) == 0 {
		return fmt.Errorf("%d forwarded proposals of term %d, life %d, number %d", len(e.Payloads), e.Term, e.Life, e.Number)
	}
	for _, p := range e.Payloads {
		if err := checkEntry(p, limit); err != nil {
			return fmt.Errorf("a forwarded entry of %d bytes: %w", len(p), err)
		}
	}
	return nil
}

package kv

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/fxamacker/cbor/v2"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
)

// Contacts describes which members the leader is in contact with.
type Contacts struct {
	Leader uint64
	Voters []uint64
	// ContactTimes maps the ID of each member except the leader to the time for which the leader has received that
	// member's messages without interruption. This time starts at the earliest with the leader's term. Its precision is
	// ContactInterval. Members from which the leader receives no messages are absent.
	ContactTimes map[uint64]time.Duration `cbor:"Heard"`
}

// ContactInterval is the interval at which the leader updates which members it is in contact with.
const ContactInterval = 250 * time.Millisecond

// contactCommand is the name under which members request the leader's Contacts.
const contactCommand = "kv.contacts"

// contacts holds, for each other member, since when the leader has received that member's messages without
// interruption, in the leader's current term.
type contacts struct {
	mu    sync.Mutex
	term  uint64
	since map[uint64]time.Duration
}

// update applies g, the group's status at the time now. It removes members without contact. If the term has changed or
// this member, self, does not lead, it first removes all members.
func (c *contacts) update(now time.Duration, self uint64, g *consensus.GroupStatus) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if g.Leader != self || g.Term != c.term || c.since == nil {
		c.term, c.since = g.Term, map[uint64]time.Duration{}
	}
	if g.Leader != self {
		return
	}
	maps.DeleteFunc(c.since, func(id uint64, _ time.Duration) bool { return !g.Active[id] })
	for id, active := range g.Active {
		if _, recorded := c.since[id]; active && !recorded && id != self {
			c.since[id] = now
		}
	}
}

// trackContacts runs until ctx ends. While this member leads, trackContacts updates s.contacts every ContactInterval
// and at each change of leader.
func (s *Service) trackContacts(ctx context.Context) {
	tick := time.NewTicker(ContactInterval)
	defer tick.Stop()
	for {
		changed := s.opts.Consensus.Changed()
		if s.Leader() == s.opts.Self {
			if g, err := s.opts.Consensus.Status(ctx); err == nil {
				s.contacts.update(s.opts.Clock(), s.opts.Self, &g)
			}
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// Contacts returns for how long the leader has been in contact with each member. It returns ErrGRPCNoLeader if no
// leader is known, or else the error if the request to the leader fails.
func (s *Service) Contacts(ctx context.Context) (out Contacts, err error) {
	leader := s.Leader()
	switch {
	case leader == 0:
		return out, rpctypes.ErrGRPCNoLeader
	case leader == s.opts.Self:
		return s.localContacts(ctx)
	case s.opts.Transport == nil:
		return out, rpctypes.ErrGRPCLeaderChanged
	}
	ctx, cancel := context.WithTimeout(ctx, 2*s.opts.Election)
	defer cancel()
	responseBody, err := s.opts.Transport.Direct(ctx, leader, contactCommand, nil)
	if err != nil {
		return out, fmt.Errorf("request the contacts of member %d: %w", leader, err)
	}
	return out, cbor.Unmarshal(responseBody, &out)
}

func (s *Service) localContacts(ctx context.Context) (Contacts, error) {
	g, err := s.opts.Consensus.Status(ctx)
	if err != nil {
		return Contacts{}, clientError(ctx, err)
	}
	if g.Leader != s.opts.Self {
		return Contacts{}, rpctypes.ErrGRPCLeaderChanged
	}
	now := s.opts.Clock()
	s.contacts.update(now, s.opts.Self, &g)
	out := Contacts{Leader: g.Leader, Voters: slices.Clone(g.Voters), ContactTimes: map[uint64]time.Duration{}}
	s.contacts.mu.Lock()
	defer s.contacts.mu.Unlock()
	for id, since := range s.contacts.since {
		out.ContactTimes[id] = now - since
	}
	return out, nil
}

func (s *Service) handleContacts() {
	s.opts.Transport.HandleDirect(contactCommand, func(ctx context.Context, _ uint64, _ []byte) ([]byte, error) {
		out, err := s.localContacts(ctx)
		if err != nil {
			return nil, err
		}
		return cbor.Marshal(out)
	})
}

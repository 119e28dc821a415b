package consensus

import "slices"

// operator changes the members of a cluster, one change at a time, as a human would: a directory that is lost is
// removed from the group before another one is added for the same member.
type operator struct {
	lost    map[uint64]bool // members that lost their directories while they were in the group
	removed map[uint64]bool // IDs of the directories whose removal was requested
	changed int             // number of changes that succeeded
}

// prepareMember starts one more member, up to six, that operator.repair can add to the group.
func (o *operator) prepareMember(c *randomRun, _ *member) {
	if len(c.ids) < 6 {
		c.addNewMember(uint64(len(c.ids) + 1))
	}
}

// loseDisk replaces a member other than the leader by one with an empty disk, unless another member has lost its disk
// or the group has only two voters.
func (o *operator) loseDisk(c *randomRun, m *member) {
	l := c.anyLeader()
	if l == nil || m == l || len(o.lost) > 0 || !o.agree(c, l) || len(l.group.storage.Members().Conf.Voters) <= 2 {
		return
	}
	c.addNewMember(m.id)
	if l.group.storage.Members().Has(m.id) {
		o.lost[m.id] = true
	}
}

// agree reports whether all voters that have not lost their disks run and know the same members as l. A leader of an
// earlier term may know others.
func (o *operator) agree(c *randomRun, l *member) bool {
	conf := l.group.storage.Members().Conf
	return !slices.ContainsFunc(conf.Voters, func(id uint64) bool {
		m := c.members[id]
		return !o.lost[id] && (!m.up || m.group.applied.Index == 0 || m.group.storage.Members().Conf.Equivalent(conf) != nil)
	})
}

// repair requests the next change that the state of member m needs: the removal of a lost member, the addition of a new
// one, the promotion of a learner, or sometimes the removal of a voter.
func (o *operator) repair(c *randomRun, m *member) {
	l := c.anyLeader()
	if l == nil {
		return
	}
	members := l.group.storage.Members()
	switch {
	case o.lost[m.id] && members.Has(m.id):
		o.request(l, Change{Kind: Remove, Member: m.id})
	case o.lost[m.id]:
		if o.agree(c, l) {
			delete(o.lost, m.id)
		}
	case m.up && m.joins && !members.Has(m.id):
		if o.removed[m.host.dirIDs.own] { // because a removed directory cannot be added again
			m = c.addNewMember(m.id)
		}
		o.request(l, Change{Kind: AddLearner, Member: m.id, DirID: m.host.dirIDs.own})
	case slices.Contains(members.Conf.Learners, m.id):
		o.request(l, Change{Kind: Promote, Member: m.id})
	case c.rng.IntN(4) == 0 && len(members.Conf.Voters) > 3 && m.joins:
		o.request(l, Change{Kind: Remove, Member: m.id})
	}
}

func (o *operator) request(l *member, change Change) {
	if change.Kind == Remove {
		o.removed[l.group.storage.Members().DirIDs[change.Member]] = true
	}
	l.group.ChangeMembers([]Change{change}, false, func(err error) {
		if err == nil {
			o.changed++
		}
	})
}

// replaceRemoved gives an empty disk to each member that stopped because it was removed.
func (o *operator) replaceRemoved(c *randomRun) {
	for _, id := range c.ids {
		if m := c.members[id]; m.up && m.host.Err() != nil {
			c.addNewMember(id)
		}
	}
}

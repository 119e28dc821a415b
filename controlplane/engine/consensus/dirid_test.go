package consensus

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

func wiped(m *member) bool {
	var w *WipedError
	return errors.As(m.host.Err(), &w) && w.Member == m.id
}

func TestFirstStartWaitsForAllMembers(t *testing.T) {
	c := newCluster(t, 3, 1)
	c.members[1].start()
	c.members[2].start()
	c.tick(100)
	for _, id := range []uint64{1, 2} {
		s := c.members[id].host.Status()
		require.False(t, s.Vouched)
		require.Equal(t, uint64(1), s.Groups[0].Term, "a member takes part in no election before the third member has started")
		require.Empty(t, c.members[id].host.dirIDs.known, "no member has recorded another's directory ID yet")
	}
	// Member 2 is restarted with another directory, which no member has recorded. It must not be refused.
	c.members[2].wipe()
	c.members[2].start()
	c.members[3].start()
	c.elect()
	for _, m := range c.members {
		require.True(t, m.host.Status().Vouched)
		require.Len(t, m.host.dirIDs.known, 2)
	}
}

func TestWipedMemberIsRefused(t *testing.T) {
	c := startCluster(t, 3, 1)
	c.put(c.leader(), "a=1")
	m := c.members[2]
	m.wipe()
	m.start()
	c.tick(30)
	require.EqualError(t, m.host.Err(), "member 2 has no data, but the cluster remembers it: trivet cluster replace 2")
	require.True(t, wiped(m))
	require.Equal(t, uint64(1), m.group.Status().Term, "the wiped member takes part in no election")
	require.ErrorIs(t, m.propose("a=2")[0].err, m.host.Err())

	// This time only one other member is up: the wiped member waits and does not vote.
	m.wipe()
	c.members[3].crash()
	m.start()
	c.tick(30)
	require.True(t, wiped(m))
	c.members[3].start()
	c.tick(30)
	c.put(c.elect(c.others(m)...), "a=2")
}

// TestTwoWipedMembersAreRefused wipes two members, which would confirm each other's new directories. The third member
// has recorded both old ones, so both must stop with a WipedError.
func TestTwoWipedMembersAreRefused(t *testing.T) {
	c := startCluster(t, 3, 1)
	c.put(c.leader(), "a=1")
	c.tick(2)
	c.members[2].wipe()
	c.members[3].wipe()
	c.members[1].crash()
	c.members[2].start()
	c.members[3].start()
	c.tick(50)
	for _, id := range []uint64{2, 3} {
		require.NoError(t, c.members[id].host.Err())
		require.False(t, c.members[id].host.Status().Vouched)
	}
	c.members[1].start()
	c.tick(50)
	require.True(t, wiped(c.members[2]))
	require.True(t, wiped(c.members[3]))
	require.Zero(t, c.members[1].group.Status().Leader)
}

// TestUnmountedDisk checks that a member whose disk is not mounted is refused, and that it is accepted when the disk is
// mounted again.
func TestUnmountedDisk(t *testing.T) {
	c := startCluster(t, 3, 1)
	c.put(c.leader(), "a=1")
	m := c.members[1]
	m.stop()
	disk := m.fs
	m.wipe()
	m.start()
	c.tick(30)
	require.True(t, wiped(m))
	m.crashTo(disk)
	m.start()
	c.elect()
	c.put(c.leader(), "a=2")
	c.converge("a=1", "a=2")
}

// TestCrashDuringDirIDConfirmation crashes a member after each message of the confirmation of its data directory. After
// a restart the directory must have the same ID and be confirmed.
func TestCrashDuringDirIDConfirmation(t *testing.T) {
	for crashAfter := range 12 {
		c := newCluster(t, 3, byte(crashAfter))
		for _, id := range c.ids {
			c.members[id].start()
		}
		dirID := c.members[2].host.dirIDs.own
		n := 0
		c.drop = func(e message.Envelope) bool {
			if e.Kind == message.KindRaft || e.From != 2 && e.To != 2 {
				return false
			}
			n++
			return n > crashAfter
		}
		c.tick(1)
		c.members[2].crash()
		c.heal()
		c.members[2].start()
		require.Equal(t, dirID, c.members[2].host.dirIDs.own)
		c.elect()
		require.True(t, c.members[2].host.dirIDs.vouched)
		c.put(c.leader(), "a=1")
		c.converge("a=1")
	}
}

// TestMessagesOfTheOldDirectoryAreIgnored wipes a member after its first votes, which are still on the network. The
// other members must refuse the new directory, because they recorded the old one before the votes.
func TestMessagesOfTheOldDirectoryAreIgnored(t *testing.T) {
	c := newCluster(t, 3, 1)
	for _, id := range c.ids {
		c.members[id].start()
	}
	var kept []packet
	c.drop = func(e message.Envelope) bool {
		if e.From == 2 && e.Kind == message.KindRaft {
			b, err := e.AppendTo(nil)
			require.NoError(t, err)
			kept = append(kept, packet{b: b, from: c.members[2]})
			return true
		}
		return false
	}
	c.tick(60) // member 2 votes, but its votes do not arrive
	require.NotEmpty(t, kept)
	c.heal()
	c.members[2].wipe()
	c.members[2].start()
	c.tick(20)
	require.True(t, wiped(c.members[2]), "the other members have recorded the lost directory, although its votes did not arrive")
}

func TestForeignDirIDIsDropped(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	f := c.others(l)[0]
	var forged message.Envelope
	c.drop = func(e message.Envelope) bool {
		if e.Kind == message.KindRaft && e.From == l.id && e.To == f.id {
			forged = e
		}
		return false
	}
	c.put(l, "a=1")
	c.heal()
	require.NotNil(t, forged.Raft)

	c.tick(1)
	c.isolate(l, f)
	c.tick(1)
	heard := f.host.heard[l.id]
	for _, change := range []func(*message.Envelope){
		func(e *message.Envelope) { e.FromDirID++ },
		func(e *message.Envelope) { e.ToDirID++ },
		func(e *message.Envelope) { e.From = 9; e.Raft.From = new(uint64(9)) },
		func(e *message.Envelope) { e.From = f.id },
		func(e *message.Envelope) { e.To = l.id },
		func(e *message.Envelope) { e.Group = 99 },
		func(e *message.Envelope) { e.Raft.From = new(c.others(l)[1].id) },
	} {
		b, err := forged.AppendTo(nil)
		require.NoError(t, err)
		e, err := message.Parse(b)
		require.NoError(t, err)
		change(&e)
		for range 3 {
			require.NoError(t, f.host.Step(e))
		}
		require.Equal(t, heard, f.host.heard[l.id])
	}
	require.Equal(t, 1, strings.Count(f.logged.String(), "whose data directory is not the recorded one"), "the foreign directory ID is logged once")
	require.NoError(t, f.host.Step(forged))
	require.Equal(t, f.host.now, f.host.heard[l.id], "the unchanged message is processed")
}

func TestDirectoryOfAnotherMemberIsRefused(t *testing.T) {
	c := startCluster(t, 3, 1)
	a, b := c.members[1], c.members[2]
	a.stop()
	b.stop()
	a.fs, b.fs = b.fs, a.fs
	a.disk, b.disk = nil, nil
	require.ErrorContains(t, a.tryStart(), "this data directory belongs to member 2, not to member 1")
	a.fs, b.fs = b.fs, a.fs
	a.disk, b.disk = nil, nil
	c.ids = []uint64{1, 2}
	require.ErrorContains(t, a.tryStart(), "was created for the members [1 2 3], not for [1 2]")
	c.ids = []uint64{1, 2, 3}
	a.start()
	b.start()
	c.elect()
}

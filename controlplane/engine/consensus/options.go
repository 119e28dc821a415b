package consensus

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// Options configures a Host.
type Options struct {
	ID        uint64    // this member's ID; required, above 0
	Members   []uint64  // the first configuration, the same on all members, including ID; required without Join
	Dir       string    // the data directory, in which the host makes log/ and snap/; required
	Transport Transport // required

	// Join is set for a member that is added to an existing cluster. It is used only when the data directory is
	// created. Members is then ignored: the member starts without a configuration and gets its state by snapshots. It
	// accepts only envelopes that name the ID of its data directory.
	Join bool

	FS   vfs.FS       // default: the operating system's
	Rand io.Reader    // source of random IDs of directories, requests and batches; default: crypto/rand.Reader
	Log  *slog.Logger // default: slog.Default()

	// ElectionTicks is the election timeout: a follower that gets no message from the leader starts an election after a
	// random time between ElectionTicks and 2 × ElectionTicks. The default is 10 ticks. HeartbeatTicks is the interval
	// at which a leader sends heartbeats. The default is 1 tick.
	ElectionTicks, HeartbeatTicks int
	// StallTicks is the duration of a log write, in ticks, after which a leader transfers leadership to another member.
	// The default is half of ElectionTicks, at least 2. It is used only under a Runner, where another goroutine writes
	// the log.
	StallTicks int

	OnLeader func(Leadership) // called during Process when this member learns of a new leader or term; optional
	// OnLogSync is called after each write of the log with the time that the write and its fsync took, on the goroutine
	// that writes the log. Optional.
	OnLogSync func(time.Duration)
	Limits    Limits

	// QuietLog turns off background compactions in the store of the log, so that a simulation is reproducible.
	QuietLog bool
}

// Limits has the limits of what a host keeps in memory and in its logs. A field that is 0 has its default value.
type Limits struct {
	ProposalBytes    int    // size of one proposal; default 8 MiB, at most 16 MiB
	UncommittedBytes uint64 // size of the pending proposals of one group; default 64 MiB
	Reads            int    // number of pending reads of one group; default 100,000
	MessageBytes     uint64 // size of the entries in one message, unless a single one is larger; default 1 MiB
	InflightMessages int    // number of unacknowledged appends to one member; default 256
	InflightBytes    uint64 // size of the unacknowledged appends to one member; default 64 MiB
	ApplyBytes       uint64 // size of the entries in one call of StateMachine.Apply; default 4 MiB
	CacheBytes       int    // size of a group's newest entries that are cached in memory; default 8 MiB
	TailEntries      uint64 // number of entries that a truncation leaves for slow members; default 10,000
	TailBytes        uint64 // size of these entries; default 16 MiB. A leader may leave more for slow members
	ProposalTicks    uint64 // timeout of a proposal (ErrUncertain or ErrNoLeader); default 5 × ElectionTicks
	ReadTicks        uint64 // timeout of a read (ErrNoLeader); default 5 × ElectionTicks
}

func (o *Options) ensureDefaults() error {
	switch {
	case o.ID == 0 || raft.IsLocalMsgTarget(o.ID):
		return fmt.Errorf("member id %d cannot be used", o.ID)
	case !o.Join && !slices.Contains(o.Members, o.ID):
		return fmt.Errorf("member %d is not in the list of members %d", o.ID, o.Members)
	case o.Dir == "" || o.Transport == nil:
		return errors.New("a host needs a directory and a transport")
	case o.Limits.ProposalBytes > message.MaxBytes/2:
		return fmt.Errorf("proposals of %d bytes do not fit into messages", o.Limits.ProposalBytes)
	}
	if o.Join {
		o.Members = nil
	}
	o.Members = slices.Sorted(slices.Values(o.Members))
	if len(o.Members) > 0 && o.Members[0] == 0 || len(slices.Compact(slices.Clone(o.Members))) != len(o.Members) {
		return fmt.Errorf("the list of members %d is not one of different ids above 0", o.Members)
	}
	if o.FS == nil {
		o.FS = vfs.Default
	}
	if o.Rand == nil {
		o.Rand = rand.Reader
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.OnLeader == nil {
		o.OnLeader = func(Leadership) {}
	}
	o.ElectionTicks = cmp.Or(o.ElectionTicks, 10)
	o.HeartbeatTicks = cmp.Or(o.HeartbeatTicks, 1)
	o.StallTicks = cmp.Or(o.StallTicks, max(o.ElectionTicks/2, 2))
	if o.HeartbeatTicks < 1 || o.ElectionTicks <= o.HeartbeatTicks {
		return fmt.Errorf("an election after %d ticks needs fewer than that between heartbeats, not %d", o.ElectionTicks, o.HeartbeatTicks)
	}
	l := &o.Limits
	l.ProposalBytes = cmp.Or(l.ProposalBytes, 8<<20)
	l.UncommittedBytes = cmp.Or(l.UncommittedBytes, 64<<20)
	l.Reads = cmp.Or(l.Reads, 100_000)
	l.MessageBytes = cmp.Or(l.MessageBytes, 1<<20)
	l.InflightMessages = cmp.Or(l.InflightMessages, 256)
	l.InflightBytes = max(cmp.Or(l.InflightBytes, 64<<20), l.MessageBytes)
	l.ApplyBytes = cmp.Or(l.ApplyBytes, 4<<20)
	l.CacheBytes = cmp.Or(l.CacheBytes, 8<<20)
	l.TailEntries = cmp.Or(l.TailEntries, 10_000)
	l.TailBytes = cmp.Or(l.TailBytes, 16<<20)
	l.ProposalTicks = cmp.Or(l.ProposalTicks, 5*uint64(o.ElectionTicks))
	l.ReadTicks = cmp.Or(l.ReadTicks, 5*uint64(o.ElectionTicks))
	return nil
}

// readRetryTicks returns the time, in ticks, after which a ReadIndex request that got no response is sent again.
func (o *Options) readRetryTicks() uint64 {
	return max(2*uint64(o.HeartbeatTicks), uint64(o.ElectionTicks)/2)
}

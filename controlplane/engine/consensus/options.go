package consensus

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// Options open a Host.
type Options struct {
	ID        uint64    // this member; required, above 0
	Members   []uint64  // the first configuration, the same on all members; contains ID; required without Join
	Dir       string    // required; the host makes log/ and snap/ in it
	Transport Transport // required

	// Join creates the data directory of a member that is added to an existing cluster. The member starts without a
	// configuration, accepts only envelopes that name its data-directory ID, and gets its state by snapshots. Members is
	// ignored then. Join has no effect on a directory that exists.
	Join bool

	FS   vfs.FS       // default: the operating system's
	Rand io.Reader    // for data-directory IDs and IDs of read requests; default: crypto/rand.Reader
	Log  *slog.Logger // default: slog.Default()

	// ElectionTicks without a word from the leader start an election, after at most twice as many; default 10. A leader
	// speaks every HeartbeatTicks; default 1.
	ElectionTicks, HeartbeatTicks int
	// StallTicks are how long a write of the log may take; then a leader hands over. Default: half of ElectionTicks. It
	// counts with a Runner only, whose log has a goroutine of its own.
	StallTicks int

	OnLeader func(Leadership) // called during Process when what this member knows changes; optional
	Limits   Limits

	// QuietLog turns off the log engine's background compactions, so that a simulation replays.
	QuietLog bool
}

// Limits bound what a host holds. Zero fields mean their default.
type Limits struct {
	ProposalBytes    int    // one proposal; default 8 MiB, at most 16 MiB
	UncommittedBytes uint64 // proposals of one group that wait; default 64 MiB
	Reads            int    // reads of one group that wait; default 100,000
	MessageBytes     uint64 // entries in one message, unless a single one is larger; default 1 MiB
	InflightMessages int    // appends under way to one member; default 256
	InflightBytes    uint64 // default 64 MiB
	ApplyBytes       uint64 // entries applied in one go; default 4 MiB
	CacheBytes       int    // newest entries of one group kept in memory; default 8 MiB
	TailEntries      uint64 // newest entries of one group kept for slow members; default 10,000,
	TailBytes        uint64 // or less if they are larger than this; default 16 MiB. A leader keeps more for one that is behind
	ProposalTicks    uint64 // after which a proposal is ErrUncertain; default 5 × ElectionTicks
	ReadTicks        uint64 // after which a read is ErrNoLeader; default 5 × ElectionTicks
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

// readRetryTicks is how long a question waits for an answer before it is put again.
func (o *Options) readRetryTicks() uint64 {
	return max(2*uint64(o.HeartbeatTicks), uint64(o.ElectionTicks)/2)
}

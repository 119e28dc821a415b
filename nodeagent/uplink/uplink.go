// Package uplink is the agent's one connection to the control plane: it joins, keeps the host's certificate fresh, finds
// the member that leads, and on one connection to it takes assignments and sends observations, heartbeats and consoles.
//
// It knows agent.v1, certificates and the network; it must not know what a VM is on this host. Assignments go out
// through Options.Assign, observations come in by [Link.Observe]; what lies between is the caller's.
//
// # What it promises
//
//   - An assignment is handed on only whole: a snapshot after its complete mark, or a delta on top of a whole one.
//   - Nothing of a lower raft term than was ever seen is handed on, also after a restart of the agent.
//   - Observations are levels. The newest of each VM is what is sent, on change, all of them on every new connection and
//     every 30 s. A reader that is slow costs no memory.
//   - The lease runs from the moment an answered heartbeat was sent, by the monotonic clock.
//
// # Decisions
//
//   - The key is made before the first Join and kept, so that an answer that was lost can be asked for again: a token is
//     consumed by the key it was first used with.
//   - A session ends as a whole. Whatever fails of it (the watch, the reports, a heartbeat without an answer) leads to a
//     new connection, to the member that a refusal named or to the next one that is known; so there is one place that
//     decides where to go, and one that starts afresh.
//   - gRPC's keepalive cannot ask more often than every 10 s, so the kernel does it: TCP keepalive and
//     TCP_USER_TIMEOUT find a dead host within [deadAfter]. A member whose process hangs while its kernel answers is
//     found by its unanswered heartbeat.
//   - The last whole assignment is kept on disk. When no member has answered [storedAfter] after start, it is handed on
//     marked Stored: it still says what this host owns, but nothing may be destroyed by it.
//   - A new identity (a Join as another node, or into another cluster) forgets the stored assignment and its term: they
//     were another's, and a cluster that was made of a backup counts its terms from there.
//   - A host that its cluster has evicted or banned says so once and asks nobody any more: not before its token is another,
//     and, banned, once a minute. Its guests stay as they are, and after a restart it goes by no stored assignment.
//   - A certificate is kept until it is replaced. A host leaves its cluster only when it is told so by that cluster's id
//     ([Options.Leave]) and holds a token of another; its key stays, and by it the other cluster knows it again if its
//     records do. A member of another cluster in the place of ours is named in one line, with what helps.
package uplink

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Protocol is the version of agent.v1 that this agent speaks.
const Protocol = 1

// DefaultPort is the members' agent listener.
const DefaultPort = "7443"

const (
	// storedAfter is how long a start waits for a member before it goes by the assignment on disk.
	storedAfter = 30 * time.Second
	// settled is how long a session must have lasted for its end not to count as one more failure in a row.
	settled = 5 * time.Second
)

// Options of a Link.
type Options struct {
	// Dir keeps key, certificate and the last assignment. It must exist and be closed to other users. Required.
	Dir string
	// Seeds are members' agent listeners, host:port. Required.
	Seeds []string
	// Token gives the join token; it is asked only when there is no certificate that could be used, or the host
	// leaves its cluster. Required.
	Token func() (string, error)
	// Leave is the id of a cluster that this host leaves, if it is in it, for that of its join token. Optional.
	Leave string
	// Name of the host and Version of the agent, as the control plane is told. Required.
	Name, Version string
	// Facts go first on every stream of reports. Required.
	Facts *agentv1.NodeFacts
	// Heartbeat says how the host is; node_id, name and agent_version are filled in here. Called every 5 s. Required.
	Heartbeat func() *vmv1.HeartbeatNodeRequest
	// Present lists the VMs that exist on this host in any form. Required.
	Present func() []cloud.VMID
	// Assign takes each new assignment: an empty one of term 0 when the host becomes another node, or one of another
	// cluster, before Cluster says so. It must not block. Required.
	Assign func(Assignment)
	// Console writes the console of a VM to w: at most its last tail bytes (0: all that is kept), and with follow what
	// comes after, until ctx ends. Its error goes to the reader. Nil: consoles are refused.
	Console func(ctx context.Context, vm cloud.VMID, tail uint64, follow bool, w io.Writer) error
	Log     *slog.Logger // required
}

// Assignment is what the host should look like, whole. Whoever gets it changes nothing in it.
type Assignment struct {
	Term     uint64
	Revision int64
	VMs      map[cloud.VMID]*agentv1.AssignedVm
	// Released are VMs that left the assignment with this message: the host keeps nothing of them.
	Released []cloud.VMID
	// Images that the host should hold, by sha256.
	Images []string
	// Stored means that it comes from the disk, no member having answered. It may be out of date.
	Stored bool
}

// Status is a look at the link.
type Status struct {
	Connected bool   // a member accepted the watch
	Member    string // host:port of it, or of the last one
	Term      uint64 // highest seen
	Revision  int64  // of the assignment held
	Sessions  uint64 // connections that came about
	Failures  uint64 // sessions and attempts that ended with an error
}

// Link is the connection. [Link.Run] keeps it; all other methods may be called at any time.
type Link struct {
	o        Options
	identity *identity
	kept     *kept
	levels   *levels
	lease    lease
	consoles *consoles

	// These belong to Run's goroutine, and to the one session that it runs.
	assembly assembly
	renewed  time.Time // last renewal of the certificate
	out      string    // why the cluster does not talk to this host, as was said; see putOut
	tried    string    // the last token that was tried since

	handing sync.Mutex  // held while an assignment is handed on; guards stored
	stored  *Assignment // the one on disk, until a member gave one

	mu      sync.Mutex // guards what follows
	status  Status
	current *grpc.ClientConn // of the session that a member accepted; nil without one
}

// Open reads what the directory keeps, and makes the host's key if there is none. It touches no network. An error means
// that the directory cannot be used or that what is in it is damaged.
func Open(o Options) (*Link, error) {
	id, err := openIdentity(o.Dir)
	if err != nil {
		return nil, err
	}
	kept, held, err := openKept(o.Dir, o.Log)
	if err != nil {
		return nil, err
	}
	l := &Link{o: o, identity: id, kept: kept, levels: newLevels(), consoles: newConsoles(o)}
	l.assembly.term, l.assembly.held, l.stored = kept.term, held, held
	l.status.Term = kept.term
	if held != nil {
		l.status.Revision = held.Revision
	}
	return l, nil
}

// Node is the id of this host, empty before it joined.
func (l *Link) Node() cloud.NodeID {
	if c := l.identity.credential(); c != nil {
		return c.node
	}
	return ""
}

// Cluster is the id of the cluster that this host is in, empty before it joined.
func (l *Link) Cluster() string {
	if c := l.identity.credential(); c != nil {
		return c.cluster
	}
	return ""
}

// Run joins if need be and keeps a session with the leader until ctx ends; it then returns nil. It returns an error only
// when the host cannot become a node: no token, one that was refused for good, or a certificate that cannot be kept.
func (l *Link) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { l.kept.run(ctx); return nil })
	group.Go(func() error { return l.goByStored(ctx) })
	group.Go(func() error {
		err := l.join(ctx)
		if err == nil {
			err = l.keepSession(ctx)
		}
		if ctx.Err() != nil {
			return nil
		}
		return err
	})
	return group.Wait()
}

// keepSession makes one session after the other until ctx ends.
func (l *Link) keepSession(ctx context.Context) error {
	var r route
	var said string
	for {
		addr := r.next(l.members())
		started := time.Now()
		err := l.session(ctx, addr)
		l.disconnected(err)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, errRenewed):
			r.hint = addr
			continue
		}
		if why := putOut(err); why != "" {
			if err := l.outside(ctx, why); err != nil {
				return err
			}
			continue
		}
		if time.Since(started) > settled {
			r.arrived()
		}
		r.missed(err)
		if text := err.Error(); text != said { // the same trouble again is said once
			said = text
			l.o.Log.Warn("no session with the control plane", "member", addr, "err", err)
		}
		if err := r.wait(ctx, len(l.members())); err != nil {
			return err
		}
	}
}

// Observe records what a VM looks like now, to be sent if it differs from what was last recorded.
func (l *Link) Observe(o cloud.Observation) { l.levels.observe(o) }

// Usage records figures of VMs that were observed before, to be sent with their observations. It should be called at
// most every 10 s.
func (l *Link) Usage(figures map[cloud.VMID]cloud.Usage) { l.levels.measure(figures) }

// Forget ends the reports of a VM of which nothing is left, neither here nor in the assignment.
func (l *Link) Forget(vm cloud.VMID) { l.levels.forget(vm) }

// Lease says until when the host holds its lease, by the monotonic clock; ok is false before the first one. That clock
// stands still while a host is suspended.
func (l *Link) Lease() (until time.Time, ok bool) { return l.lease.get() }

// Status is a look at the link.
func (l *Link) Status() Status {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status
}

// goByStored hands on the assignment on disk when no member has given one for long.
func (l *Link) goByStored(ctx context.Context) error {
	wait := time.NewTimer(storedAfter)
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-ctx.Done():
		return nil
	}
	l.handing.Lock()
	defer l.handing.Unlock()
	if l.stored != nil {
		l.o.Log.Warn("no member answers: going by the stored assignment", "revision", l.stored.Revision)
		stale := *l.stored
		stale.Stored = true
		l.o.Assign(stale)
	}
	return nil
}

// take keeps an assignment that is whole, and hands it on.
func (l *Link) take(a *Assignment) {
	l.kept.put(a)
	l.mu.Lock()
	l.status.Term, l.status.Revision = a.Term, a.Revision
	l.mu.Unlock()
	l.handing.Lock()
	defer l.handing.Unlock()
	l.stored = nil
	l.o.Assign(*a)
}

func (l *Link) connected(conn *grpc.ClientConn, addr string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.current = conn
	l.status.Connected, l.status.Member = true, addr
	l.status.Sessions++
}

func (l *Link) disconnected(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.current = nil
	l.status.Connected = false
	if !errors.Is(err, errRenewed) {
		l.status.Failures++
	}
}

// members are all known listeners, those that the control plane named first. It is not empty.
func (l *Link) members() []string {
	var all []string
	if c := l.identity.credential(); c != nil {
		all = append(all, c.members...)
	}
	for _, seed := range l.o.Seeds {
		if !slices.Contains(all, seed) {
			all = append(all, seed)
		}
	}
	return all
}

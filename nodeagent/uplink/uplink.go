// Package uplink maintains the agent's single connection to the control plane. It joins the cluster, renews the host's
// certificate and finds the leader. On one connection to the leader it receives assignments and sends observations,
// heartbeats, consoles and the content of snapshots, and the state of the host's VPCs.
//
// The package implements agent.v1 on the agent's side. It does not depend on how this host runs a VM: it delivers
// assignments through Options.Assign and receives observations through [Link.Observe]. It delivers the VPCs of the host
// through Options.Networks and sends the acknowledgments of [Link.AcknowledgeNetworks].
//
// # Guarantees
//
//   - Only complete assignments are delivered: a snapshot after its complete mark, or a delta on top of a complete
//     assignment.
//   - Messages of a lower raft term than the highest one seen are never delivered, also after a restart of the agent.
//   - Only complete updates of networks are delivered, and a snapshot first on every new connection. While there is no
//     connection, the last state stays in force.
//   - An observation describes the current state of a VM, so only the newest one of each VM is sent: when it changes,
//     and all of them on every new connection and every 30 s. A slow receiver therefore costs no memory.
//   - The lease runs from the time at which an acknowledged heartbeat was sent, by the monotonic clock.
//
// # Decisions
//
//   - The host's key is made before the first Join and stored, so that a Join whose response was lost can be repeated:
//     a token is bound to the key with which it was first used.
//   - A session fails as a whole. If any part fails (the watch, the reports, a heartbeat without a response), the agent
//     opens a new connection, to the leader that the error named or to the next known member. So one place in the code
//     chooses the member, and one place restarts everything.
//   - gRPC's keepalive cannot probe more often than every 10 s, so the kernel's probes are used: TCP keepalive and
//     TCP_USER_TIMEOUT detect a dead host within [deadAfter]. A member whose process hangs while its kernel still
//     acknowledges is detected by a heartbeat that times out.
//   - The last complete assignment is stored on disk. If no member has sent an assignment within [storedDelay] of the
//     start, the stored one is delivered with Stored set: it lists the VMs that this host owns, but must not be used to
//     destroy anything.
//   - A new identity (a Join as another node, or into another cluster) discards the stored assignment and its term.
//     They belonged to the old identity, and a cluster that was restored from a backup continues with the backup's
//     terms.
//   - A host that its cluster has evicted or banned logs this once and then contacts no member until its token changes;
//     a banned host also retries once a minute. Its guests keep running, and it does not use the stored assignment.
//   - A certificate is used until it is replaced. A host leaves its cluster only if [Options.Leave] is that cluster's
//     id and the host has a token of another cluster. It then uses the same key, by which the other cluster recognizes
//     the host if it has a record of it. If a member of another cluster responds without this configuration, one log
//     line names that cluster and what the operator can do.
package uplink

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"github.com/trivet-cloud/trivet/nodeagent/console"
	"github.com/trivet-cloud/trivet/nodeagent/lease"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Protocol is the version of agent.v1 that this agent implements.
const Protocol = 1

// DefaultPort is the port of the members' agent listener.
const DefaultPort = "7443"

const (
	// storedDelay is how long the agent waits after its start for an assignment from a member before it delivers the
	// stored one.
	storedDelay = 30 * time.Second
	// stableSession is the duration after which a session counts as successful, so that the pause after its end is the
	// shortest again.
	stableSession = 5 * time.Second
)

// Options configures a Link.
type Options struct {
	// Dir is the directory of the host's key, its certificate and the last assignment. It must exist, and other users
	// must have no access. Required.
	Dir string
	// Seeds are the addresses of members' agent listeners, as host:port. One that responds is enough. Required.
	Seeds []string
	// LocalIP is the local address of connections to members. Optional; by default the kernel chooses it.
	LocalIP netip.Addr
	// Token returns the join token. It is called only if there is no usable certificate, or if the host leaves its
	// cluster or was evicted or banned. Required.
	Token func() (string, error)
	// Leave is the id of a cluster. If the host is in this cluster, it leaves it for the cluster of its join token.
	// Optional.
	Leave string
	// Name of the host and Version of the agent, as sent to the control plane. Required.
	Name, Version string
	// Facts returns the host's properties. The Link sends them in the first message on every stream of reports, and
	// when they have changed. Required.
	Facts func() *agentv1.NodeFacts
	// Heartbeat returns the request with the host's state; the Link fills in node_id, name and agent_version. Called
	// every 5 s. Required.
	Heartbeat func() *vmv1.HeartbeatNodeRequest
	// Present returns the VMs of which this host has a process, disks or records. Required.
	Present func() []cloud.VMID
	// Assign receives each new assignment. When the host becomes another node, or joins another cluster, it first
	// receives an empty assignment of term 0, before Cluster returns the new cluster. It must not block. Required.
	Assign func(Assignment)
	// Connected is called when a member has accepted a session, before the first heartbeat of the session is sent.
	// Optional.
	Connected func()
	// Lease is renewed by each acknowledged heartbeat. Optional.
	Lease *lease.Lease
	// Console writes the console of a VM to w: at most its last tail bytes (0: all of the log), and with follow all
	// later output, until ctx ends. Its error is sent to the reader. If Console is nil, requests for consoles get an
	// error.
	Console func(ctx context.Context, vm cloud.VMID, tail uint64, follow bool, w io.Writer) error
	// OpenConsole serves a console of a VM over pipe, until its user closes it or ctx ends. If the error is a
	// *console.Refusal, the user gets it. If OpenConsole is nil, requests to open consoles get an error.
	OpenConsole func(ctx context.Context, r *agentv1.OpenConsoleRequest, pipe console.Pipe) error
	// Snapshot writes the content of a snapshot to w. Its error is sent to the reader. If Snapshot is nil, requests for
	// snapshots get an error.
	Snapshot func(ctx context.Context, r *agentv1.SnapshotRequest, w SnapshotWriter) error
	// Guest sends a request to the guest agent of a VM and returns the result. Its error is sent to the caller, and must
	// not contain secrets of the request. If Guest is nil, the requests get an error.
	Guest func(ctx context.Context, r *agentv1.GuestRequest) (*agentv1.GuestResult, error)
	// Networks applies the host's VPCs, and HostNetwork describes the host's network to the control plane. If Networks is
	// nil, the host gets no VPCs. Optional.
	Networks    Networks
	HostNetwork *agentv1.HostNetwork
	Log         *slog.Logger // required
}

// Assignment is the complete desired state of all VMs and volumes of the host. Receivers must not modify it.
type Assignment struct {
	Term     uint64
	Revision int64
	VMs      map[cloud.VMID]*agentv1.AssignedVm
	Volumes  map[cloud.VolumeID]*agentv1.AssignedVolume
	// Released are VMs that this assignment removed from the host's desired state: the host deletes everything that it
	// has of them.
	Released []cloud.VMID
	// Images are the SHA-256 sums of the images that the host should have in its cache.
	Images []string
	// Stored means that the assignment was read from disk, because no member sent one. It may be out of date.
	Stored bool
}

// Status is the state of a Link at one time.
type Status struct {
	Connected bool   // whether a member has accepted the watch
	Member    string // host:port of that member, or of the last one
	Term      uint64 // highest raft term that a member sent
	Revision  int64  // of the current assignment
	Sessions  uint64 // connections that a member has accepted
	Failures  uint64 // sessions and attempts that ended with an error
}

// Link maintains the agent's connection to the control plane while [Link.Run] runs. All other methods may be called at
// any time.
type Link struct {
	o            Options
	identity     *identity
	disk         *assignmentStore
	observations *observations
	volumes      *volumeObservations
	lease        hostLease
	consoles     *transfers
	// consoleStreams are the open consoles, in both directions.
	consoleStreams *transfers
	snapshots      *transfers
	guests         *transfers
	networkAcks    networkAcks

	// The fields below are used only by Run's goroutine and its current session.
	assembly   assembly
	networks   networkAssembly
	renewed    time.Time // last renewal of the certificate
	exclusion  string    // last logged reason of an exclusion; see exclusionReason
	triedToken string    // last join token that was tried while excluded

	deliverMu sync.Mutex  // locked while an assignment is delivered; guards stored
	stored    *Assignment // the assignment on disk, until a member sends one

	mu      sync.Mutex // guards the fields below
	status  Status
	current *grpc.ClientConn // connection of the accepted session; nil if there is none
}

// Open returns a Link with the state that o.Dir contains, and makes the host's key if there is none. It does not use
// the network. It returns an error if the directory cannot be used or its content is damaged.
func Open(o Options) (*Link, error) {
	if err := atomicfile.RemoveLeftovers(o.Dir); err != nil {
		return nil, err
	}
	id, err := openIdentity(o.Dir)
	if err != nil {
		return nil, err
	}
	disk, assignment, err := openAssignmentStore(o.Dir, o.Log)
	if err != nil {
		return nil, err
	}
	l := &Link{o: o, identity: id, disk: disk, observations: newObservations(),
		consoles: newTransfers("consoles", maxConsoles, o.Log), consoleStreams: newTransfers("open consoles", maxConsoleStreams, o.Log),
		snapshots: newTransfers("snapshots", maxSnapshots, o.Log),
		guests:    newTransfers("guest agent calls", maxGuestCalls, o.Log),
	}
	l.volumes = newVolumeObservations(l.observations.wake)
	l.networkAcks.wake = make(chan struct{}, 1)
	l.assembly.term, l.assembly.current, l.stored = disk.term, assignment, assignment
	l.status.Term = disk.term
	if assignment != nil {
		l.status.Revision = assignment.Revision
	}
	return l, nil
}

// Node returns the id of this host in its cluster, or "" if it has not joined one.
func (l *Link) Node() cloud.NodeID {
	if c := l.identity.credential(); c != nil {
		return c.node
	}
	return ""
}

// Cluster returns the id of this host's cluster, or "" if it has not joined one.
func (l *Link) Cluster() string {
	if c := l.identity.credential(); c != nil {
		return c.cluster
	}
	return ""
}

// Certificate returns the host's certificate, its private key in PKCS #8, and the authority of the cluster. All are in
// DER. Certificate returns an error if the host has not joined a cluster.
func (l *Link) Certificate() (certificate, key, authority []byte, err error) {
	c := l.identity.credential()
	if c == nil {
		return nil, nil, nil, errors.New("this host has not joined a cluster")
	}
	key, err = x509.MarshalPKCS8PrivateKey(l.identity.key)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("encode key: %w", err)
	}
	return c.cert.Certificate[0], key, c.authority.Raw, nil
}

// CertificateExpiry returns the time at which the host's certificate expires. It returns the zero time if the host has
// not joined a cluster.
func (l *Link) CertificateExpiry() time.Time {
	c := l.identity.credential()
	if c == nil {
		return time.Time{}
	}
	return c.cert.Leaf.NotAfter
}

// Run joins the cluster if necessary, and maintains a session with the leader until ctx ends. It then returns nil. It
// returns an error only if the host cannot become a node: no token, a token that was refused for good, or a certificate
// that cannot be stored.
func (l *Link) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { l.disk.run(ctx); return nil })
	group.Go(func() error { return l.deliverStored(ctx) })
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

// keepSession opens a session, and another one whenever a session has ended, until ctx ends. It returns an error other
// than that of ctx only if a host that was evicted or banned cannot store a new certificate.
func (l *Link) keepSession(ctx context.Context) error {
	var r route
	var lastText string
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
		if why := exclusionReason(err); why != "" {
			if err := l.waitExcluded(ctx, why); err != nil {
				return err
			}
			continue
		}
		if time.Since(started) > stableSession {
			r.succeeded()
		}
		r.failed(err)
		if text := err.Error(); text != lastText { // a repeated error is logged once
			lastText = text
			l.o.Log.Warn("no session with the control plane", "member", addr, "err", err)
		}
		if err := r.wait(ctx, len(l.members())); err != nil {
			return err
		}
	}
}

// Observe queues the current state of a VM, to be sent to the control plane. It does nothing if the state equals the
// VM's last observation.
func (l *Link) Observe(o cloud.Observation) { l.observations.observe(o) }

// Usage queues the resource usage of VMs, to be sent to the control plane with the last observation of each VM. It
// ignores VMs without an observation. The caller should call Usage at most every 10 s.
func (l *Link) Usage(figures map[cloud.VMID]cloud.Usage) { l.observations.measure(figures) }

// Forget discards the observation of a VM, so that it is not reported any more. It is for a VM that is neither on this
// host nor in the assignment.
func (l *Link) Forget(vm cloud.VMID) { l.observations.forget(vm) }

// ObserveVolume queues the current state of a volume, to be sent to the control plane. It does nothing if the state
// equals the volume's last observation.
func (l *Link) ObserveVolume(o cloud.VolumeObservation) { l.volumes.observe(o) }

// ForgetVolume discards the observation of a volume, so that the volume is not reported any more.
func (l *Link) ForgetVolume(id cloud.VolumeID) { l.volumes.forget(id) }

// Lease returns the end of the host's lease, by the monotonic clock, which does not advance while the host is
// suspended. The result ok is false if the host has not had a lease yet.
func (l *Link) Lease() (until time.Time, ok bool) { return l.lease.get() }

// Contact returns the time at which the agent sent the last heartbeat that a member has acknowledged. It returns false
// if no heartbeat was acknowledged yet.
func (l *Link) Contact() (sent time.Time, ok bool) { return l.lease.contact() }

// Status returns the present state of the link.
func (l *Link) Status() Status {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status
}

// deliverStored waits for storedDelay. If no member has sent an assignment by then, deliverStored delivers the one on
// disk, with Stored set.
func (l *Link) deliverStored(ctx context.Context) error {
	wait := time.NewTimer(storedDelay)
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-ctx.Done():
		return nil
	}
	l.deliverMu.Lock()
	defer l.deliverMu.Unlock()
	if l.stored != nil {
		l.o.Log.Warn("no member answers: using the stored assignment", "revision", l.stored.Revision)
		stale := *l.stored
		stale.Stored = true
		l.o.Assign(stale)
	}
	return nil
}

// deliver passes a complete assignment to Options.Assign, and queues it to be written to disk.
func (l *Link) deliver(a *Assignment) {
	l.disk.put(a)
	l.mu.Lock()
	l.status.Term, l.status.Revision = a.Term, a.Revision
	l.mu.Unlock()
	l.deliverMu.Lock()
	defer l.deliverMu.Unlock()
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

// members returns the addresses of all known members' agent listeners: first those that the control plane has sent with
// the certificate, then the other Seeds. The result is not empty.
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

package network

import (
	"context"
	"errors"
	"io"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// feedTick is how long a session waits after a change, so that it sends further changes in the same message.
const feedTick = 20 * time.Millisecond

// protectedInterval is the shortest time between two messages of a session with the protected addresses. Each message
// makes the host apply all its VPCs. When many hosts join or start at once, one message has all their addresses, and
// each host applies its VPCs only once. Until then, guests can reach the new hosts only as far as the hosts' own packet
// filters permit.
const protectedInterval = time.Second

// maxUnsent is the maximum number of changed records that a session has not sent. A session with more ends.
const maxUnsent = 20_000

// feedSession is one SyncNetworks stream of a host.
type feedSession struct {
	node cloud.NodeID
	term uint64
	// host is the network of the host as it was reported on this stream.
	host cloud.HostNetwork
	// cancel ends the session with a cause.
	cancel context.CancelCauseFunc
	// wake receives a value when there may be something to send.
	wake chan struct{}

	// Feed.mu guards the following fields:

	// unsent has the records that have changed and were not sent yet.
	unsent map[recordKey]struct{}
	// lost has the VPCs that the host stopped needing since the last message. The session got no changes of them
	// meanwhile, so a VPC that the host needs again is sent as a whole.
	lost map[cloud.VPCID]struct{}
	// confirm is true if a message is to be sent even without a change. It is true at first, for the snapshot.
	confirm bool
	// vpcs has the VPCs that the host has received, with their projects.
	vpcs map[cloud.VPCID]cloud.ProjectID
	// underlay is the version of the hosts' underlay addresses that the host has received, 0 before the snapshot.
	// underlayAt is when the session last took the addresses.
	underlay   uint64
	underlayAt time.Time
	// sent is the revision of the last complete message, and sentAt its time.
	sent   int64
	sentAt time.Time
	// acked is the revision that the host has acknowledged.
	acked int64
	// peers are the peers whose keys the host has received. It is nil before the snapshot, and for a host that does not
	// encrypt. It was computed from the index at the version peersVersion.
	peers        *peerList
	peersVersion uint64

	// protected are the protected addresses that the session has sent. Only send uses them.
	protected []string
}

// mark records a change to send, and wakes the session. The caller holds Feed.mu.
func (s *feedSession) mark(c hostChange) {
	if c.key.id != "" {
		s.unsent[c.key] = struct{}{}
	}
	if c.lost != "" {
		s.lost[c.lost] = struct{}{}
	}
	s.confirm = s.confirm || c.confirm
	if len(s.unsent) > maxUnsent {
		s.cancel(fault.New(fault.OutOfRange, "the host has not read %d changes: begin with a snapshot", maxUnsent))
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// errNewerStream is the error of a session that ended because the same host opened a newer one.
var errNewerStream = fault.New(fault.Aborted, "another SyncNetworks stream of this host has begun")

// Sync implements node.NetworkController: it sends a host a snapshot of the VPCs that it needs and then each change,
// and processes its acknowledgments. It returns when the stream's context ends or when the session is canceled.
func (f *Feed) Sync(
	node cloud.NodeID, term uint64, first *agentv1.SyncNetworksRequest, stream agentv1.AgentService_SyncNetworksServer,
	charge func(context.Context, int) error,
) error {
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	host, err := hostNetworkFrom(first.GetHost())
	if err != nil {
		return err
	}
	if err := f.storeHost(ctx, node, host); err != nil {
		return err
	}
	s := &feedSession{
		node: node, term: term, host: host, cancel: cancel, wake: make(chan struct{}, 1), unsent: map[recordKey]struct{}{}, confirm: true,
		lost: map[cloud.VPCID]struct{}{}, vpcs: map[cloud.VPCID]cloud.ProjectID{},
	}
	if err := f.open(ctx, s); err != nil {
		return err
	}
	defer f.close(s)
	// The two goroutines can wait for the host in Send and Recv. gRPC ends these calls when the handler of the stream
	// has returned, so Sync does not wait for the goroutines.
	go func() { cancel(f.send(ctx, s, stream.Send)) }()
	go func() { cancel(f.receive(ctx, s, stream.Recv, charge)) }()
	<-ctx.Done()
	if cause := context.Cause(ctx); !errors.Is(cause, io.EOF) {
		return cause
	}
	return nil
}

// recordTimeout limits how long a session waits for a write of records.
const recordTimeout = 10 * time.Second

// storeHost stores the host's description of its network if it has changed.
func (f *Feed) storeHost(ctx context.Context, node cloud.NodeID, n cloud.HostNetwork) error {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	_, err := f.opts.Store.Update(ctx, func(tx *store.Tx) error { return SetHostNetwork(tx, node, n) })
	return err
}

// open registers a session once Follow has read all records. It ends an older session of the host.
func (f *Feed) open(ctx context.Context, s *feedSession) error {
	for {
		f.mu.Lock()
		begun := f.begun
		if f.index != nil {
			break
		}
		f.mu.Unlock()
		select {
		case <-begun:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	defer f.mu.Unlock()
	if old := f.sessions[s.node]; old != nil {
		old.cancel(errNewerStream)
	}
	f.sessions[s.node] = s
	f.metrics.sessions.Set(float64(len(f.sessions)))
	return nil
}

func (f *Feed) close(s *feedSession) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.sessions[s.node] == s {
		delete(f.sessions, s.node)
	}
	f.metrics.sessions.Set(float64(len(f.sessions)))
}

// send sends the snapshot and then the changes, until ctx ends or a message cannot be sent.
func (f *Feed) send(ctx context.Context, s *feedSession, send func(*agentv1.SyncNetworksResponse) error) error {
	later := time.NewTimer(0)
	defer later.Stop()
	for {
		d, wait, ok := f.take(s)
		if ok {
			if err := f.sendDelta(ctx, s, d, send); err != nil {
				return err
			}
		}
		later.Stop()
		if wait > 0 {
			later.Reset(wait)
		}
		select {
		case <-s.wake:
		case <-later.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		select {
		case <-time.After(feedTick):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

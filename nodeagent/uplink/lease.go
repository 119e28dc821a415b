package uplink

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/nodeagent/lease"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	heartbeatInterval = 5 * time.Second
	heartbeatTimeout  = 3 * time.Second
)

// hostLease holds the end of the host's lease, for metrics and for the lease of addresses. Package lease has the lease
// that decides whether VMs may run. The lease of addresses that another host can take over is shorter: see
// cloud.AddressLease.
type hostLease struct {
	mu    sync.Mutex // guards the fields below
	until time.Time
	// sent is the time at which the last acknowledged heartbeat was sent.
	sent time.Time
}

// renew moves the end of the lease to the time sent plus the duration lasts, if that is later than the present end. The
// time sent is when the acknowledged heartbeat was sent. The control plane counts from the arrival of the heartbeat, so
// the lease ends there a little later than on this host.
func (l *hostLease) renew(sent time.Time, lasts time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if until := sent.Add(lasts); until.After(l.until) {
		l.until = until
	}
	if sent.After(l.sent) {
		l.sent = sent
	}
}

func (l *hostLease) contact() (time.Time, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sent, !l.sent.IsZero()
}

func (l *hostLease) get() (time.Time, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.until, !l.until.IsZero()
}

// sessionEndingCodes holds the gRPC codes of a failed heartbeat after which the agent ends the session and tries
// another member. Errors with other codes concern this host, and every member would return the same.
var sessionEndingCodes = map[codes.Code]bool{
	codes.Unavailable: true, codes.DeadlineExceeded: true, codes.FailedPrecondition: true, codes.Aborted: true,
	codes.Canceled: true, codes.Unknown: true,
}

// errUnacknowledged ends a session whose heartbeats the member refuses. The next session begins with a new snapshot of
// the host's networks, because other hosts may have taken over addresses of this host.
var errUnacknowledged = errors.New("the member has acknowledged no heartbeat for " + cloud.AddressLease.String())

// sendHeartbeats sends a heartbeat every heartbeatInterval. It returns when ctx ends, when a heartbeat fails with a
// code in sessionEndingCodes, or when no heartbeat has succeeded for cloud.AddressLease. A heartbeat that succeeds
// renews the lease; lasts is the duration of a lease.
func (l *Link) sendHeartbeats(ctx context.Context, node vmv1.NodeServiceClient, lasts time.Duration) error {
	var lastText string
	acknowledged := time.Now()
	tick := time.NewTicker(heartbeatInterval)
	defer tick.Stop()
	for {
		err := l.sendHeartbeat(ctx, node, lasts)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			lastText, acknowledged = "", time.Now()
		case sessionEndingCodes[code(err)]:
			return err
		case time.Since(acknowledged) >= cloud.AddressLease:
			return fmt.Errorf("%w: %w", errUnacknowledged, err)
		case lastText != err.Error():
			lastText = err.Error()
			l.o.Log.Warn("heartbeat refused", "err", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (l *Link) sendHeartbeat(ctx context.Context, node vmv1.NodeServiceClient, lasts time.Duration) error {
	request := l.o.Heartbeat()
	request.NodeId, request.Name, request.AgentVersion = string(l.Node()), l.o.Name, l.o.Version
	ctx, cancel := context.WithTimeout(ctx, heartbeatTimeout)
	defer cancel()
	sent, sentAt := time.Now(), lease.Now()
	if _, err := node.HeartbeatNode(ctx, request); err != nil {
		return err
	}
	if mutant.On(mutant.LeaseFromReceipt) {
		sent, sentAt = time.Now(), lease.Now()
	}
	l.lease.renew(sent, lasts)
	if l.o.Lease == nil {
		return nil
	}
	if err := l.o.Lease.Renew(sentAt, lasts); err != nil {
		l.o.Log.Error("cannot store the lease: a restarted agent would power off VMs too early", "err", err)
	}
	return nil
}

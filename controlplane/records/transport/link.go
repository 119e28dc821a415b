package transport

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/trivet-cloud/trivet/shared/mtls"
)

// link holds the connections to one other member, and the limits of transfers with it.
type link struct {
	member  uint64
	address string
	conn    *grpc.ClientConn
	// stop ends the goroutine that runs keepConnected for this member; nil while it is not running.
	stop     context.CancelFunc
	peerConn *peerConn
	// called receives a signal when the other member has connected to this one, so that this one reconnects at once.
	// Its capacity is 1.
	called chan struct{}
	// snapshots is a semaphore of size 1 for sending snapshots.
	snapshots chan struct{}
	// arriving is a semaphore of size 2 for receiving snapshots. One is for the current snapshot. The other is for an
	// earlier snapshot whose connection is dead but has not timed out yet.
	arriving chan struct{}
}

// SetMembers sets the addresses (host:port) of the known members by ID, and the IDs of removed members. Connections to
// members whose address does not change remain open.
func (m *Transport) SetMembers(addresses map[uint64]string, removed []uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over {
		return nil
	}
	for id, l := range m.links {
		if addresses[id] != l.address {
			delete(m.links, id)
			if l.stop != nil {
				l.stop()
			}
			l.conn.Close()
		}
	}
	m.removed = map[uint64]bool{}
	for _, id := range removed {
		m.removed[id] = true
	}
	for id, address := range addresses {
		if id == m.opts.Self || m.links[id] != nil {
			continue
		}
		conn, err := m.dial(address, func(other mtls.ID) error { return isMember(other, id) })
		if err != nil {
			return fmt.Errorf("prepare connection to member %d: %w", id, err)
		}
		l := &link{
			member: id, address: address, conn: conn, peerConn: newPeerConn(), called: make(chan struct{}, 1),
			snapshots: make(chan struct{}, 1), arriving: make(chan struct{}, 2),
		}
		m.links[id] = l
		if m.ctx != nil {
			m.start(l)
		}
	}
	return nil
}

// Members returns the addresses of the other known members by ID.
func (m *Transport) Members() map[uint64]string {
	m.mu.RLock()
	defer m.mu.RUnlock()
	out := map[uint64]string{}
	for id, l := range m.links {
		out[id] = l.address
	}
	return out
}

// start starts the goroutine that connects to the member of l for envelopes, and reconnects after failures. The caller
// must have locked m.mu.
func (m *Transport) start(l *link) {
	ctx, cancel := context.WithCancel(m.ctx)
	l.stop = cancel
	m.pumps.Go(func() {
		defer cancel()
		m.keepConnected(ctx, l)
	})
}

func (m *Transport) link(member uint64) *link {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.links[member]
}

// dial returns a gRPC client connection to address. It connects on first use, and only to a server for whose
// certificate accept returns nil.
func (m *Transport) dial(address string, accept mtls.Accept) (*grpc.ClientConn, error) {
	config := mtls.Client(m.opts.Certificate, m.opts.Authority.Certificate(), accept)
	config.Time = m.opts.Now
	return grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(credentials.NewTLS(config)),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: 2 * time.Second,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second, PermitWithoutStream: true}),
	)
}

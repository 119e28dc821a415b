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

// link is the way to one other member.
type link struct {
	member  uint64
	address string
	conn    *grpc.ClientConn
	// stop ends the pump, nil while there is none.
	stop context.CancelFunc
	lane *lane
	// called says that the member has called here. Capacity 1.
	called chan struct{}
	// snapshots holds one on its way out at a time.
	snapshots chan struct{}
	// arriving holds those on their way in: one, and one before it whose connection is not known to be dead yet.
	arriving chan struct{}
}

// SetMembers makes these the members that are known, by their addresses (host:port), and says who was removed. What is
// under way to those who stay where they are goes on.
func (m *Mesh) SetMembers(addresses map[uint64]string, removed []uint64) error {
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
			member: id, address: address, conn: conn, lane: newLane(), called: make(chan struct{}, 1),
			snapshots: make(chan struct{}, 1), arriving: make(chan struct{}, 2),
		}
		m.links[id] = l
		if m.ctx != nil {
			m.start(l)
		}
	}
	return nil
}

// Members are the addresses of the other members that are known.
func (m *Mesh) Members() map[uint64]string {
	m.mu.RLock()
	defer m.mu.RUnlock()
	out := map[uint64]string{}
	for id, l := range m.links {
		out[id] = l.address
	}
	return out
}

// start begins to send to a member. m.mu is held.
func (m *Mesh) start(l *link) {
	ctx, cancel := context.WithCancel(m.ctx)
	l.stop = cancel
	m.pumps.Go(func() {
		defer cancel()
		m.pump(ctx, l)
	})
}

func (m *Mesh) link(member uint64) *link {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.links[member]
}

// dial prepares a connection to whoever accept accepts.
func (m *Mesh) dial(address string, accept mtls.Accept) (*grpc.ClientConn, error) {
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

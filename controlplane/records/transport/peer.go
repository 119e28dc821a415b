// Package peer connects the members of a control plane, on port 2380, each proven by its certificate: raft's envelopes
// and snapshots, the leader's commands, the bytes of images.
//
// A Mesh is the transport of consensus and the Caller of lead. To each other member it keeps a connection of gRPC, and
// one for envelopes alone (lane.go, wire.go, receive.go): frames on TLS, written by whoever sends them as long as none
// wait, because every change of goroutines on the way shows in the time that a write takes. The two share the port; the
// handshake tells them apart. What cannot be sent is dropped, as raft expects. Who the members are it is told
// (SetMembers), at any time: whoever else holds the cluster key may ask to be let in, and nothing more. It knows no
// records.
package transport

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	peerv1 "github.com/trivet-cloud/trivet/protos/peer/v1"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

const (
	// maxMessage is the limit of a message of gRPC on this port.
	maxMessage = message.MaxBytes + 1<<20
	// reachTime is how long a call waits for a connection.
	reachTime = time.Second
)

// Options of a Mesh; all are required but those that say otherwise.
type Options struct {
	Self uint64
	// Members are the addresses (host:port) of the members known at first; this one counts for nothing. Optional.
	Members map[uint64]string
	// Certificate is this member's own.
	Certificate mtls.Source
	Authority   *mtls.Authority
	Log         *slog.Logger
	// Now is the clock that certificates are judged by; time.Now when nil.
	Now func() time.Time
	// Stranger hears of members that call and are not known here: this one may be behind. It must not block. Optional.
	Stranger func(member uint64)
	// Removed hears that another member has refused this one as removed. Optional.
	Removed func()
}

// Images are a member's image files.
type Images interface {
	// Open opens the verified copy of an image; NotFound without one.
	Open(sha256 string) (io.ReadSeekCloser, error)
}

// Mesh is one member's connections.
type Mesh struct {
	opts Options

	// Set by Attach, before Run and Register.
	runner   *consensus.Runner
	commands *leader.Commands
	images   Images
	direct   map[string]direct
	deliver  func(message.Envelope) bool

	patience patience

	// ctx is Run's, nil while it does not run, and over says that it will not again; sending are the snapshots under way.
	mu      sync.RWMutex
	links   map[uint64]*link
	removed map[uint64]bool
	inbound map[net.Conn]uint64 // that envelopes come in on, by whom once that is clear
	ctx     context.Context
	over    bool

	pumps, sending, receiving sync.WaitGroup
}

var (
	_ consensus.Transport = (*Mesh)(nil)
	_ leader.Caller       = (*Mesh)(nil)
)

// New makes a mesh. It dials nothing before Run.
func New(opts Options) (*Mesh, error) {
	m := &Mesh{
		opts: opts, links: map[uint64]*link{}, direct: map[string]direct{}, inbound: map[net.Conn]uint64{},
		patience: patience{ask: 3 * time.Second, answer: 5 * time.Second, quiet: 12 * time.Second},
	}
	return m, m.SetMembers(opts.Members, nil)
}

// isMember accepts the certificate of one member.
func isMember(id mtls.ID, member uint64) error {
	if id.Kind != mtls.Member || id.Name != strconv.FormatUint(member, 10) {
		return fmt.Errorf("%s answers at the address of member %d", id, member)
	}
	return nil
}

// Attach gives the mesh what it serves.
func (m *Mesh) Attach(runner *consensus.Runner, commands *leader.Commands, images Images) {
	m.runner, m.commands, m.images, m.deliver = runner, commands, images, runner.Deliver
}

// Register adds the service to the server of port 2380, whose credentials must be the mesh's Credentials.
func (m *Mesh) Register(g grpc.ServiceRegistrar) { peerv1.RegisterPeerServiceServer(g, &service{m: m}) }

// Run sends envelopes and snapshots until ctx ends, then closes the connections.
func (m *Mesh) Run(ctx context.Context) {
	m.mu.Lock()
	m.ctx = ctx
	for _, l := range m.links {
		m.start(l)
	}
	m.mu.Unlock()
	<-ctx.Done()
	m.mu.Lock()
	m.ctx, m.over = nil, true
	m.mu.Unlock()
	m.hangUp()
	m.pumps.Wait()
	m.sending.Wait()
	m.receiving.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.links {
		l.conn.Close()
	}
}

// Send implements consensus.Transport.
func (m *Mesh) Send(e message.Envelope) {
	l := m.link(e.To)
	if l == nil {
		return
	}
	if err := l.lane.send(&e); err != nil {
		m.lost(l, err)
	}
}

// sender is the member that a call comes from, by its certificate; it must be known here.
func (m *Mesh) sender(ctx context.Context) (uint64, error) {
	member, err := certified(ctx)
	if err != nil {
		return 0, err
	}
	return m.known(member)
}

// known refuses a member that is none of this cluster's, as far as this one knows.
func (m *Mesh) known(member uint64) (uint64, error) {
	m.mu.RLock()
	known, removed := m.links[member] != nil, m.removed[member]
	m.mu.RUnlock()
	switch {
	case known:
		return member, nil
	case removed:
		return 0, fault.New(fault.PermissionDenied, "member %d was removed from the cluster", member).WithReason(reasonRemoved)
	case member != m.opts.Self && member != 0 && m.opts.Stranger != nil:
		m.opts.Stranger(member)
	}
	return 0, fault.New(fault.PermissionDenied, "member %d is not known here", member)
}

// reasonRemoved tells a member that it is one no more.
const reasonRemoved = "MEMBER_REMOVED"

// saysRemoved reads it.
func saysRemoved(err error) bool {
	if f, ok := fault.From(err); ok {
		return f.Reason == reasonRemoved
	}
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetReason() == reasonRemoved {
			return true
		}
	}
	return false
}

// certified is the member that a call comes from, by its certificate; 0 is one that knows no id yet.
func certified(ctx context.Context) (uint64, error) {
	p, ok := grpcpeer.FromContext(ctx)
	if !ok {
		return 0, fault.New(fault.Unauthenticated, "no connection")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return 0, fault.New(fault.Unauthenticated, "no certificate")
	}
	return memberOf(info.State)
}

// reach waits a little for a connection to a member. Its error is the caller's own when that gave up meanwhile.
func (m *Mesh) reach(ctx context.Context, member uint64) (peerv1.PeerServiceClient, error) {
	l := m.link(member)
	if l == nil {
		return nil, fmt.Errorf("member %d: %w", member, leader.ErrNotSent)
	}
	limited, cancel := context.WithTimeout(ctx, reachTime)
	defer cancel()
	for {
		state := l.conn.GetState()
		if state == connectivity.Ready {
			return peerv1.NewPeerServiceClient(l.conn), nil
		}
		l.conn.Connect()
		if failed := state == connectivity.TransientFailure || state == connectivity.Shutdown; failed || !l.conn.WaitForStateChange(limited, state) {
			return nil, unknown(ctx, fmt.Errorf("member %d cannot be reached: %w", member, leader.ErrNotSent))
		}
	}
}

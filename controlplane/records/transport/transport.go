// Package transport connects the members of a control plane on port 2380 with mutual TLS. It carries raft messages
// (envelopes) and snapshots, commands for the leader, and the bytes of images.
//
// The main type is Transport, which implements consensus.Transport and leader.Caller.
//
// Decisions:
//   - A member has two connections to each other member: one for gRPC, and one for the envelopes that it sends
//     (peerconn.go, envelopeconn.go, receive.go). Both use the same port; the TLS handshake selects the protocol (ALPN).
//   - Envelopes are frames on TLS. The sending goroutine writes a frame itself if no other frames wait, because each
//     switch between goroutines adds to the latency of a write.
//   - An envelope that cannot be sent is dropped, because raft repeats lost messages.
//   - SetMembers sets the members and may be called at any time. Other holders of a certificate of the cluster may only
//     call the commands of HandleNonMember, such as a request to join.
//
// The package must not know records.
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
	// maxMessage is the largest gRPC message on port 2380, in bytes.
	maxMessage = message.MaxBytes + 1<<20
	// reachTime is how long a call waits for a connection before it fails with leader.ErrNotSent.
	reachTime = time.Second
)

// Options configures a Transport. All fields are required unless stated otherwise.
type Options struct {
	Self uint64
	// Members holds the initial addresses (host:port) by member ID. An entry for Self is ignored. Optional.
	Members map[uint64]string
	// Certificate returns this member's certificate, which the Transport shows to other members.
	Certificate mtls.Source
	Authority   *mtls.Authority
	Log         *slog.Logger
	// Now is the clock for the validity of certificates; time.Now when nil.
	Now func() time.Time
	// UnknownMember is called with the ID of a member that connects but is not among the known members. The list of
	// known members may then be outdated. The function must not block. Optional.
	UnknownMember func(member uint64)
	// Removed is called when another member refuses this one because it was removed from the cluster. Optional.
	Removed func()
}

// Images opens and stores image files on this member.
type Images interface {
	// Open opens the verified copy of the image with this SHA-256. It returns a NotFound fault if this member has none.
	Open(sha256 string) (io.ReadSeekCloser, error)
	// StorePart reads r to its end, verifies the SHA-256 and stores the bytes as a file. It returns when the file is
	// synced to disk. It fails if r has more bytes than a part of an image upload may have.
	StorePart(ctx context.Context, sha256 string, r io.Reader) error
}

// Transport holds the connections of one member to all others.
type Transport struct {
	opts Options

	// Fields that Attach sets, before Run and Register:
	runner   *consensus.Runner
	commands *leader.Commands
	images   Images
	direct   map[string]direct
	deliver  func(message.Envelope) bool

	timeouts timeouts

	// ctx is the context of Run; it is nil while Run is not running. over is true when Run has ended; Run cannot be
	// called again then.
	mu      sync.RWMutex
	links   map[uint64]*link
	removed map[uint64]bool
	inbound map[net.Conn]uint64 // incoming connections for envelopes, with the member's ID; 0 until verified
	ctx     context.Context
	over    bool

	pumps, sending, receiving sync.WaitGroup
}

var (
	_ consensus.Transport = (*Transport)(nil)
	_ leader.Caller       = (*Transport)(nil)
)

// New returns a Transport. It opens no connections until Run is called.
func New(opts Options) (*Transport, error) {
	m := &Transport{
		opts: opts, links: map[uint64]*link{}, direct: map[string]direct{}, inbound: map[net.Conn]uint64{},
		timeouts: timeouts{pingInterval: 3 * time.Second, response: 5 * time.Second, idle: 12 * time.Second},
	}
	return m, m.SetMembers(opts.Members, nil)
}

// isMember returns an error if id, the identity in a certificate, is not the identity of the given member.
func isMember(id mtls.ID, member uint64) error {
	if id.Kind != mtls.Member || id.Name != strconv.FormatUint(member, 10) {
		return fmt.Errorf("%s answers at the address of member %d", id, member)
	}
	return nil
}

// Attach sets the parts of this member that serve other members. Call it before Run and Register.
func (m *Transport) Attach(runner *consensus.Runner, commands *leader.Commands, images Images) {
	m.runner, m.commands, m.images, m.deliver = runner, commands, images, runner.Deliver
}

// Register adds the peer service to the gRPC server of port 2380. That server must use m.Credentials.
func (m *Transport) Register(g grpc.ServiceRegistrar) {
	peerv1.RegisterPeerServiceServer(g, &service{m: m})
}

// Run sends envelopes and snapshots until ctx ends. It then closes all connections and returns.
func (m *Transport) Run(ctx context.Context) {
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
	m.closeIncoming()
	m.pumps.Wait()
	m.sending.Wait()
	m.receiving.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.links {
		l.conn.Close()
	}
}

// Send implements consensus.Transport. It sends or queues an envelope without blocking, and drops it if the member is
// unknown.
func (m *Transport) Send(e message.Envelope) {
	l := m.link(e.To)
	if l == nil {
		return
	}
	if err := l.peerConn.send(&e); err != nil {
		m.logLost(l, err)
	}
}

// sender returns the ID of the member that sent the call, from its certificate. It returns an error if the member is
// not known.
func (m *Transport) sender(ctx context.Context) (uint64, error) {
	member, err := certified(ctx)
	if err != nil {
		return 0, err
	}
	return m.known(member)
}

// known returns member if it is a known member of the cluster. If it was removed or is unknown, known returns a
// PermissionDenied fault. For an unknown member it also calls Options.UnknownMember.
func (m *Transport) known(member uint64) (uint64, error) {
	m.mu.RLock()
	known, removed := m.links[member] != nil, m.removed[member]
	m.mu.RUnlock()
	switch {
	case known:
		return member, nil
	case removed:
		return 0, fault.New(fault.PermissionDenied, "member %d was removed from the cluster", member).WithReason(reasonRemoved)
	case member != m.opts.Self && member != 0 && m.opts.UnknownMember != nil:
		m.opts.UnknownMember(member)
	}
	return 0, fault.New(fault.PermissionDenied, "member %d is not known here", member)
}

// reasonRemoved is the machine-readable reason (google.rpc.ErrorInfo) of the error that a member gets after it was
// removed from the cluster.
const reasonRemoved = "MEMBER_REMOVED"

// isRemoved reports whether err is a refusal because this member was removed from the cluster.
func isRemoved(err error) bool {
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

// certified returns the ID of the member that sent the call, from its certificate. The ID is 0 for a member that has
// none yet.
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

// reach returns a gRPC client of a member. It waits up to reachTime for a connection. If there is still no connection,
// it returns ErrNotSent, or the error of ctx if ctx has ended.
func (m *Transport) reach(ctx context.Context, member uint64) (peerv1.PeerServiceClient, error) {
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

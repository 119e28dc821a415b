// Package peer connects the members of a control plane, on port 2380, each proven by its certificate: raft's envelopes
// and snapshots, the leader's commands, the bytes of images.
//
// A Mesh is the transport of consensus and the Caller of lead. It keeps one connection to each other member and one
// stream of envelopes each way; what cannot be sent is dropped, as raft expects. It knows no records.
package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	grpcpeer "google.golang.org/grpc/peer"

	peerv1 "github.com/trivet-cloud/trivet/protos/peer/v1"

	"github.com/trivet-cloud/trivet/controlplane/consensus"
	"github.com/trivet-cloud/trivet/controlplane/lead"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

const (
	// envelopeVersion is the major version of what RaftFrames carry.
	envelopeVersion = 1
	// queue is how many envelopes wait for one member.
	queue = 8192
	// frameBytes is about how much of them goes into one message.
	frameBytes = 1 << 20
	// maxFrames is the limit of a message on this port.
	maxFrames = consensus.MaxEnvelopeBytes + 1<<20
	// reachTime is how long a call waits for a connection.
	reachTime = time.Second
)

// Options of a Mesh; all are required.
type Options struct {
	Self uint64
	// Members are the addresses (host:port) of all members, this one included.
	Members map[uint64]string
	// Certificate is this member's own.
	Certificate mtls.Source
	Authority   *mtls.Authority
	Log         *slog.Logger
}

// Images are a member's image files.
type Images interface {
	// Open opens the verified copy of an image; NotFound without one.
	Open(sha256 string) (io.ReadSeekCloser, error)
}

// Mesh is one member's connections.
type Mesh struct {
	opts  Options
	links map[uint64]*link

	// Set by Attach, before Run and Register.
	runner   *consensus.Runner
	commands *lead.Commands
	images   Images
}

var (
	_ consensus.Transport = (*Mesh)(nil)
	_ lead.Caller         = (*Mesh)(nil)
)

// link is the way to one other member.
type link struct {
	member uint64
	conn   *grpc.ClientConn
	queue  chan consensus.Envelope
	// snapshots holds one at a time.
	snapshots chan struct{}
}

// New makes a mesh. It dials nothing before Run.
func New(opts Options) (*Mesh, error) {
	m := &Mesh{opts: opts, links: map[uint64]*link{}}
	for id, address := range opts.Members {
		if id == opts.Self {
			continue
		}
		config := mtls.Client(opts.Certificate, opts.Authority.Certificate(), func(other mtls.ID) error { return isMember(other, id) })
		conn, err := grpc.NewClient("passthrough:///"+address,
			grpc.WithTransportCredentials(credentials.NewTLS(config)),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxFrames), grpc.MaxCallSendMsgSize(maxFrames)),
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
				MinConnectTimeout: 2 * time.Second,
			}),
			grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second, PermitWithoutStream: true}),
		)
		if err != nil {
			return nil, fmt.Errorf("prepare connection to member %d: %w", id, err)
		}
		m.links[id] = &link{member: id, conn: conn, queue: make(chan consensus.Envelope, queue), snapshots: make(chan struct{}, 1)}
	}
	return m, nil
}

// isMember accepts the certificate of one member.
func isMember(id mtls.ID, member uint64) error {
	if id.Kind != mtls.Member || id.Name != strconv.FormatUint(member, 10) {
		return fmt.Errorf("%s answers at the address of member %d", id, member)
	}
	return nil
}

// Attach gives the mesh what it serves.
func (m *Mesh) Attach(runner *consensus.Runner, commands *lead.Commands, images Images) {
	m.runner, m.commands, m.images = runner, commands, images
}

// Register adds the service to the server of port 2380.
func (m *Mesh) Register(g *grpc.Server) { peerv1.RegisterPeerServiceServer(g, &service{m: m}) }

// Run sends envelopes until ctx ends, then closes the connections.
func (m *Mesh) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, l := range m.links {
		wg.Go(func() { m.pump(ctx, l) })
	}
	wg.Wait()
	for _, l := range m.links {
		l.conn.Close()
	}
}

// Send implements consensus.Transport.
func (m *Mesh) Send(e consensus.Envelope) {
	l := m.links[e.To]
	if l == nil {
		return
	}
	select {
	case l.queue <- e:
	default: // raft sends again
	}
}

// pump keeps a stream of envelopes to one member.
func (m *Mesh) pump(ctx context.Context, l *link) {
	for ctx.Err() == nil {
		err := m.stream(ctx, l)
		if ctx.Err() != nil {
			return
		}
		m.opts.Log.Debug("stream to member ended", "member", l.member, "err", err)
		m.runner.ReportUnreachable(l.member)
		m.drain(l)
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// drain forgets what waits: it is old by the time a connection is there again.
func (m *Mesh) drain(l *link) {
	for {
		select {
		case <-l.queue:
		default:
			return
		}
	}
}

func (m *Mesh) stream(ctx context.Context, l *link) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := peerv1.NewPeerServiceClient(l.conn).Raft(ctx, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	// The answer only comes when the stream is over; waiting for it tells at once that the other side is gone.
	over := make(chan error, 1)
	go func() {
		over <- s.RecvMsg(&peerv1.RaftClosed{})
		cancel()
	}()
	for {
		select {
		case e := <-l.queue:
			batch, err := m.gather(l, e)
			if err != nil {
				return err
			}
			if err := s.Send(batch); err != nil {
				return err
			}
		case <-ctx.Done():
			s.CloseSend()
			return <-over
		}
	}
}

// gather takes what waits behind the first envelope, up to a message's worth.
func (m *Mesh) gather(l *link, e consensus.Envelope) (*peerv1.RaftFrames, error) {
	batch := &peerv1.RaftFrames{Version: envelopeVersion}
	for size := 0; ; {
		frame, err := e.AppendTo(nil)
		if err != nil {
			return nil, fmt.Errorf("encode envelope: %w", err)
		}
		batch.Frames = append(batch.Frames, frame)
		if size += len(frame); size >= frameBytes {
			return batch, nil
		}
		select {
		case e = <-l.queue:
		default:
			return batch, nil
		}
	}
}

// receive takes envelopes from one member, which speaks for itself only.
func (m *Mesh) receive(s peerv1.PeerService_RaftServer) error {
	from, err := m.sender(s.Context())
	if err != nil {
		return err
	}
	for {
		batch, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return s.SendAndClose(&peerv1.RaftClosed{})
		}
		if err != nil {
			return err
		}
		if batch.GetVersion() != envelopeVersion {
			return fault.New(fault.FailedPrecondition, "member %d speaks version %d of the raft protocol, this one %d: upgrade the older",
				from, batch.GetVersion(), envelopeVersion)
		}
		for _, frame := range batch.GetFrames() {
			e, err := m.accept(frame, from)
			if err != nil {
				return err
			}
			m.runner.Deliver(e)
		}
	}
}

func (m *Mesh) accept(frame []byte, from uint64) (consensus.Envelope, error) {
	e, err := consensus.ParseEnvelope(frame)
	if err != nil {
		return e, fault.New(fault.InvalidArgument, "envelope: %v", err)
	}
	if e.From != from || e.To != m.opts.Self {
		return e, fault.New(fault.PermissionDenied, "member %d may not send from %d to %d here", from, e.From, e.To)
	}
	return e, nil
}

// sender is the member that a call comes from, by its certificate; it must be of the configuration.
func (m *Mesh) sender(ctx context.Context) (uint64, error) {
	p, ok := grpcpeer.FromContext(ctx)
	if !ok {
		return 0, fault.New(fault.Unauthenticated, "no connection")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return 0, fault.New(fault.Unauthenticated, "no certificate")
	}
	id, ok := mtls.PeerID(info.State)
	if !ok || id.Kind != mtls.Member {
		return 0, fault.New(fault.Unauthenticated, "not the certificate of a member")
	}
	member, err := strconv.ParseUint(id.Name, 10, 64)
	if err != nil || m.links[member] == nil {
		return 0, fault.New(fault.PermissionDenied, "%s is not of this configuration", id)
	}
	return member, nil
}

// reach waits a little for a connection to a member.
func (m *Mesh) reach(ctx context.Context, member uint64) (peerv1.PeerServiceClient, error) {
	l := m.links[member]
	if l == nil {
		return nil, fmt.Errorf("member %d: %w", member, lead.ErrNotSent)
	}
	ctx, cancel := context.WithTimeout(ctx, reachTime)
	defer cancel()
	for {
		state := l.conn.GetState()
		if state == connectivity.Ready {
			return peerv1.NewPeerServiceClient(l.conn), nil
		}
		l.conn.Connect()
		if state == connectivity.TransientFailure || !l.conn.WaitForStateChange(ctx, state) {
			return nil, fmt.Errorf("member %d cannot be reached: %w", member, lead.ErrNotSent)
		}
	}
}

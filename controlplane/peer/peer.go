// Package peer connects the members of a control plane, on port 2380, each proven by its certificate: raft's envelopes
// and snapshots, the leader's commands, the bytes of images.
//
// A Mesh is the transport of consensus and the Caller of lead. It keeps one connection to each other member and one
// stream of envelopes each way; what cannot be sent is dropped, as raft expects. Who the members are it is told
// (SetMembers), at any time: whoever else holds the cluster key may ask to be let in, and nothing more. It knows no
// records.
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

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

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
	// frameBytes is about how much of them goes into one message: the last one may exceed it by its own size, and all of
	// them still fit maxFrames.
	frameBytes = 512 << 10
	// maxFrames is the limit of a message on this port.
	maxFrames = consensus.MaxEnvelopeBytes + 1<<20
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
	commands *lead.Commands
	images   Images
	direct   map[string]direct

	// ctx is Run's, nil while it does not run, and over says that it will not again; sending are the snapshots under way.
	mu      sync.RWMutex
	links   map[uint64]*link
	removed map[uint64]bool
	ctx     context.Context
	over    bool
	pumps   sync.WaitGroup
	sending sync.WaitGroup
}

var (
	_ consensus.Transport = (*Mesh)(nil)
	_ lead.Caller         = (*Mesh)(nil)
)

// New makes a mesh. It dials nothing before Run.
func New(opts Options) (*Mesh, error) {
	m := &Mesh{opts: opts, links: map[uint64]*link{}, direct: map[string]direct{}}
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
func (m *Mesh) Attach(runner *consensus.Runner, commands *lead.Commands, images Images) {
	m.runner, m.commands, m.images = runner, commands, images
}

// Register adds the service to the server of port 2380.
func (m *Mesh) Register(g *grpc.Server) { peerv1.RegisterPeerServiceServer(g, &service{m: m}) }

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
	m.pumps.Wait()
	m.sending.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.links {
		l.conn.Close()
	}
}

// Send implements consensus.Transport.
func (m *Mesh) Send(e consensus.Envelope) {
	l := m.link(e.To)
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
	said := ""
	for ctx.Err() == nil {
		began := time.Now()
		err := m.stream(ctx, l)
		if ctx.Err() != nil {
			return
		}
		// Once is enough for whoever reads the log, until it has worked for a while; a refusal also when it is another.
		if time.Since(began) > 10*time.Second {
			said = ""
		}
		if saysRemoved(err) && m.opts.Removed != nil {
			m.opts.Removed()
		}
		switch refused := status.Code(err) != codes.Unavailable; {
		case refused && err.Error() != said:
			m.opts.Log.Warn("member does not take envelopes", "member", l.member, "err", err)
		case said == "":
			m.opts.Log.Info("member cannot be reached", "member", l.member, "err", err)
		}
		said = err.Error()
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

// errClosed ends a stream that the other side ended without a word.
var errClosed = errors.New("the member closed the stream")

// stream sends envelopes until something fails; the error is never nil. It does not wait for a member that cannot be
// reached, so that what is sent to it meanwhile is dropped and not kept until it is back.
func (m *Mesh) stream(ctx context.Context, l *link) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := peerv1.NewPeerServiceClient(l.conn).Raft(ctx)
	if err != nil {
		return err
	}
	// The answer only comes when the stream is over; waiting for it tells at once that the other side is gone, and why.
	over := make(chan error, 1)
	go func() {
		err := s.RecvMsg(&peerv1.RaftClosed{})
		if err == nil {
			err = errClosed
		}
		over <- err
		cancel()
	}()
	for {
		select {
		case e := <-l.queue:
			batch := m.gather(l, e)
			if len(batch.GetFrames()) == 0 {
				continue
			}
			if err := s.Send(batch); errors.Is(err, io.EOF) {
				return <-over
			} else if err != nil {
				cancel()
				<-over
				return err
			}
		case <-ctx.Done():
			return <-over
		}
	}
}

// gather takes what waits behind the first envelope, up to a message's worth. What cannot be encoded is lost like
// anything else that cannot be sent.
func (m *Mesh) gather(l *link, e consensus.Envelope) *peerv1.RaftFrames {
	batch := &peerv1.RaftFrames{Version: envelopeVersion}
	for size := 0; ; {
		if frame, err := e.AppendTo(nil); err != nil {
			m.opts.Log.Error("envelope lost", "member", l.member, "err", err)
		} else {
			batch.Frames = append(batch.Frames, frame)
			size += len(frame)
		}
		if size >= frameBytes {
			return batch
		}
		select {
		case e = <-l.queue:
		default:
			return batch
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

// sender is the member that a call comes from, by its certificate; it must be known here.
func (m *Mesh) sender(ctx context.Context) (uint64, error) {
	member, err := certified(ctx)
	if err != nil {
		return 0, err
	}
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
	id, ok := mtls.PeerID(info.State)
	if !ok || id.Kind != mtls.Member {
		return 0, fault.New(fault.Unauthenticated, "not the certificate of a member")
	}
	member, err := strconv.ParseUint(id.Name, 10, 64)
	if err != nil {
		return 0, fault.New(fault.PermissionDenied, "%s names no member", id)
	}
	return member, nil
}

// reach waits a little for a connection to a member. Its error is the caller's own when that gave up meanwhile.
func (m *Mesh) reach(ctx context.Context, member uint64) (peerv1.PeerServiceClient, error) {
	l := m.link(member)
	if l == nil {
		return nil, fmt.Errorf("member %d: %w", member, lead.ErrNotSent)
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
			return nil, unknown(ctx, fmt.Errorf("member %d cannot be reached: %w", member, lead.ErrNotSent))
		}
	}
}

package node

import (
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/records/transport"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Protocol is the major version of the protocol agent.v1 that this program implements. Agents with another version are
// refused.
const Protocol = 1

// ImageSource opens this member's verified copy of an image. Open returns NotFound if this member has none.
type ImageSource interface {
	Open(sha256 string) (io.ReadSeekCloser, error)
}

// OpenMethod is the full name of Join, the only agent method that may be called without a client certificate.
const OpenMethod = agentv1.AgentService_Join_FullMethodName

// RegisterAgents registers the services that agents call, on the server of port 7443.
func (s *Service) RegisterAgents(g grpc.ServiceRegistrar) {
	agentv1.RegisterAgentServiceServer(g, &agents{s: s})
	vmv1.RegisterNodeServiceServer(g, &heartbeats{s: s})
}

type agents struct {
	agentv1.UnsafeAgentServiceServer
	s *Service
}

func checkProtocol(v uint32) error {
	if v != Protocol {
		return fault.New(fault.FailedPrecondition, "the agent speaks version %d of the protocol, the control plane %d: upgrade the older one", v, Protocol)
	}
	return nil
}

func (a *agents) Join(ctx context.Context, r *agentv1.JoinRequest) (*agentv1.Credential, error) {
	if err := checkProtocol(r.GetProtocol()); err != nil {
		return nil, err
	}
	parts := strings.Split(strings.TrimSpace(r.GetToken()), ".")
	if len(parts) != 3 || len(r.GetToken()) > 512 {
		return nil, errBadToken()
	}
	if err := checkHostName(r.GetName()); err != nil {
		return nil, err
	}
	csr, key, err := checkRequest(r.GetCsr())
	if err != nil {
		return nil, err
	}
	id, err := admitCommand.Call(ctx, a.s.opts.Commands, joinRequest{ID: parts[0], Secret: parts[1], Name: r.GetName(), Key: key})
	if err != nil {
		return nil, err
	}
	a.s.opts.Log.Info("host joined", "node", id, "name", r.GetName(), "key", keyText(key))
	return a.s.credential(ctx, id, csr.PublicKey)
}

func (s *Service) credential(ctx context.Context, id cloud.NodeID, public any) (*agentv1.Credential, error) {
	at := s.opts.Now()
	if e, err := s.evicted(ctx, id); err != nil {
		return nil, err
	} else if e != nil {
		at = e.issueTime(at)
	}
	cert, err := s.opts.Authority.Issue(mtls.Node, string(id), public, at, CertificateLife)
	if err != nil {
		return nil, err
	}
	c := &agentv1.Credential{Certificate: cert.Raw, Authority: s.opts.Authority.Certificate().Raw, NodeId: string(id)}
	listeners := s.opts.Listeners()
	for _, member := range slices.Sorted(maps.Keys(listeners)) {
		c.Members = append(c.Members, listeners[member])
	}
	return c, nil
}

// Renew issues a new certificate to a host whose current one is valid or expired at most RenewGrace ago; the TLS
// handshake fails for older ones. The new certificate must be for the same key, because bans refer to keys.
func (a *agents) Renew(ctx context.Context, r *agentv1.RenewRequest) (*agentv1.Credential, error) {
	leaf, err := peerCertificate(ctx)
	if err != nil {
		return nil, err
	}
	id, err := a.s.certifiedHost(ctx, leaf)
	if err != nil {
		return nil, err
	}
	leave, err := a.s.beginCall(ctx, id)
	if err != nil {
		return nil, err
	}
	defer leave()
	csr, _, err := checkRequest(r.GetCsr())
	if err != nil {
		return nil, err
	}
	if !sameKey(csr.PublicKey, leaf.PublicKey) {
		return nil, fault.Invalid("csr", "must be for the key of the connection's certificate")
	}
	return a.s.credential(ctx, id, csr.PublicKey)
}

func (a *agents) Watch(r *agentv1.WatchRequest, stream agentv1.AgentService_WatchServer) error {
	id, leave, err := a.s.admit(stream.Context())
	if err != nil {
		return err
	}
	defer leave()
	if err := checkProtocol(r.GetProtocol()); err != nil {
		return err
	}
	if len(r.GetPresentVms()) > maxPresent {
		return fault.Invalid("present_vms", "at most %d", maxPresent)
	}
	for _, vm := range r.GetPresentVms() {
		if err := cloud.CheckUUID("present_vms", vm); err != nil {
			return err
		}
	}
	ctx, cancel, err := a.s.untilExpiry(stream.Context())
	if err != nil {
		return err
	}
	defer cancel()
	if err := a.s.throttle(ctx, a.s.budgetOf(id).watches, 1); err != nil {
		return err
	}
	return a.s.watch(ctx, id, r.GetPresentVms(), stream.Send)
}

// untilExpiry returns a context that ends when the client certificate of the stream expires, with errExpired as the
// cause.
func (s *Service) untilExpiry(ctx context.Context) (context.Context, context.CancelFunc, error) {
	leaf, err := peerCertificate(ctx)
	if err != nil || leaf == nil {
		return nil, nil, cmp.Or(err, errExpired())
	}
	ctx, cancel := context.WithTimeoutCause(ctx, leaf.NotAfter.Sub(s.opts.Now()), errExpired())
	return ctx, cancel, nil
}

func errExpired() error {
	return fault.New(fault.Unauthenticated, "the host's certificate has expired: renew it")
}

func (a *agents) Report(stream agentv1.AgentService_ReportServer) error {
	id, leave, err := a.s.admit(stream.Context())
	if err != nil {
		return err
	}
	defer leave()
	end, err := a.s.beginReport(id)
	if err != nil {
		return err
	}
	defer end()
	b, keyKept := a.s.budgetOf(id), false
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&agentv1.ReportResponse{})
		}
		if err != nil {
			return err
		}
		if err := checkReport(r); err != nil {
			return err
		}
		// Apply the host's rate limit before reading the stream's next message.
		if err := a.s.throttle(stream.Context(), b.observations, messageCost+len(r.GetVms())+len(r.GetVolumes())); err != nil {
			return err
		}
		if err := a.s.checkLeader(); err != nil {
			return err
		}
		// Check the host again for each message: its certificate may expire, or its record be deleted, while the stream
		// is open.
		if _, err := a.s.caller(stream.Context()); err != nil {
			return err
		}
		if f := r.GetFacts(); f != nil {
			if err := a.s.receiveFacts(stream.Context(), id, f); err != nil {
				return err
			}
			if !keyKept {
				if err := a.s.storePeerKey(stream.Context(), id); err != nil {
					return err
				}
				keyKept = true
			}
		}
		var reports []cloud.Observation
		for _, o := range r.GetVms() {
			reports = append(reports, convert.ObservationFrom(o))
		}
		if err := a.s.applyReports(stream.Context(), id, reports); err != nil {
			return err
		}
		if err := a.s.applyVolumeReports(stream.Context(), id, r.GetVolumes()); err != nil {
			return err
		}
	}
}

// checkReport returns InvalidArgument if a message of Report has too many observations.
func checkReport(r *agentv1.ReportRequest) error {
	for _, of := range []struct {
		field string
		n     int
	}{{"vms", len(r.GetVms())}, {"volumes", len(r.GetVolumes())}} {
		if of.n > maxObservations {
			return fault.Invalid(of.field, "at most %d in a message, got %d: send several messages", maxObservations, of.n)
		}
	}
	return nil
}

func (a *agents) ReadImage(r *agentv1.ReadImageRequest, stream agentv1.AgentService_ReadImageServer) error {
	id, leave, err := a.s.admit(stream.Context())
	if err != nil {
		return err
	}
	defer leave()
	if !a.s.beginReading(id) {
		return fault.New(fault.Unavailable, "this host reads %d images already", maxImageReads).MayRetry()
	}
	defer a.s.endReading(id)
	f, err := a.s.openImage(stream.Context(), id, r.GetSha256())
	if err != nil {
		return err
	}
	defer f.Close()
	return transport.Chunks(f, r.GetOffset(), func(b []byte) error { return stream.Send(&agentv1.ReadImageResponse{Data: b}) })
}

func (a *agents) SendConsole(stream agentv1.AgentService_SendConsoleServer) error {
	id, leave, err := a.s.admit(stream.Context())
	if err != nil {
		return err
	}
	defer leave()
	if err := forward(stream.Context(), a.s.consoles, id, stream.Recv); err != nil {
		return err
	}
	return stream.SendAndClose(&agentv1.SendConsoleResponse{})
}

func (a *agents) StreamConsole(stream agentv1.AgentService_StreamConsoleServer) error {
	id, leave, err := a.s.admit(stream.Context())
	if err != nil {
		return err
	}
	defer leave()
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	one, err := a.s.openConsoles.accept(id, first.GetRequestId())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(stream.Context())
	// reading ends when the caller is gone, so that the handler returns even if the VM prints nothing.
	reading, stop := context.WithCancel(ctx)
	var sending sync.WaitGroup
	defer sending.Wait()
	defer cancel()
	sending.Go(func() {
		defer stop()
		inputEnded := one.inputEnded
		for {
			select {
			case data := <-one.input:
				if stream.Send(&agentv1.StreamConsoleResponse{Data: data}) != nil {
					return // the stream has ended, and Recv returns the reason
				}
			case <-inputEnded:
				inputEnded = nil
				if stream.Send(&agentv1.StreamConsoleResponse{End: true}) != nil {
					return
				}
			case <-one.closed:
				return
			case <-ctx.Done():
				return
			}
		}
	})
	next := rpc.Receiver(stream.Context(), stream.Recv)
	recv := func() (*agentv1.StreamConsoleRequest, error) { return next(reading) }
	message, err := recv() // the first message only names the request; the next one says whether the console is open
	return forwardTo(stream.Context(), a.s.openConsoles, one, message, err, recv)
}

func (a *agents) SendSnapshot(stream agentv1.AgentService_SendSnapshotServer) error {
	id, leave, err := a.s.admit(stream.Context())
	if err != nil {
		return err
	}
	defer leave()
	if err := forward(stream.Context(), a.s.snapshots, id, stream.Recv); err != nil {
		return err
	}
	return stream.SendAndClose(&agentv1.SendSnapshotResponse{})
}

func (a *agents) SendGuestResult(stream agentv1.AgentService_SendGuestResultServer) error {
	id, leave, err := a.s.admit(stream.Context())
	if err != nil {
		return err
	}
	defer leave()
	if err := forward(stream.Context(), a.s.guests, id, stream.Recv); err != nil {
		return err
	}
	return stream.SendAndClose(&agentv1.SendGuestResultResponse{})
}

// heartbeats implements NodeService for agents, on port 7443. It supports only HeartbeatNode.
type heartbeats struct {
	vmv1.UnimplementedNodeServiceServer
	s *Service
}

func (h *heartbeats) HeartbeatNode(ctx context.Context, r *vmv1.HeartbeatNodeRequest) (*vmv1.Node, error) {
	id, leave, err := h.s.admit(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	if r.GetNodeId() != string(id) && !mutant.On(mutant.AnyNodeID) {
		return nil, fault.New(fault.PermissionDenied, "a host can send heartbeats only for itself: node_id must be %s", id)
	}
	n, err := h.s.heartbeat(ctx, convert.NodeFrom(r))
	if err != nil {
		return nil, err
	}
	now := h.s.opts.Steady().UnixMilli()
	return convert.Node(&n, n.State(now, now), now), nil
}

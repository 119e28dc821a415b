package console

import (
	"context"
	"net/url"

	"google.golang.org/grpc"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	consolev1 "github.com/trivet-cloud/trivet/protos/console/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Register registers ConsoleService of console.v1 for API callers.
func (s *Service) Register(g grpc.ServiceRegistrar) {
	consolev1.RegisterConsoleServiceServer(g, &server{s: s})
}

type server struct {
	consolev1.UnsafeConsoleServiceServer
	s *Service
}

const service = "/console.v1.ConsoleService/"

// kinds are the consoles of console.v1 in agent.v1.
var kinds = map[consolev1.ConsoleKind]agentv1.ConsoleKind{
	consolev1.ConsoleKind_CONSOLE_KIND_UNSPECIFIED: agentv1.ConsoleKind_CONSOLE_KIND_SERIAL,
	consolev1.ConsoleKind_CONSOLE_KIND_SERIAL:      agentv1.ConsoleKind_CONSOLE_KIND_SERIAL,
	consolev1.ConsoleKind_CONSOLE_KIND_VNC:         agentv1.ConsoleKind_CONSOLE_KIND_VNC,
}

func kindOf(k consolev1.ConsoleKind) (agentv1.ConsoleKind, error) {
	kind, ok := kinds[k]
	if !ok {
		return 0, fault.Invalid("kind", "unknown kind of console %d", k)
	}
	return kind, nil
}

func (r *server) AttachConsole(stream consolev1.ConsoleService_AttachConsoleServer) error {
	ctx := stream.Context()
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	t, err := auth.Admit(ctx, service+"AttachConsole", first.GetOrgId(), first.GetProjectId())
	if err != nil {
		return err
	}
	kind, err := kindOf(first.GetKind())
	if err != nil {
		return err
	}
	next := rpc.Receiver(ctx, stream.Recv)
	opened := false
	return r.s.Attach(ctx, t, Session{
		VM: cloud.VMID(first.GetVmId()), Kind: kind, ReadOnly: first.GetReadOnly(), TakeOver: first.GetTakeOver(),
		TailBytes: first.GetTailBytes(), FromOffset: first.FromOffset, FromLog: first.GetFromLog(),
	}, node.ConsolePipe{
		Recv: func(ctx context.Context) ([]byte, error) {
			m, err := next(ctx)
			return m.GetData(), err
		},
		Send: func(out node.ConsoleOutput) error {
			m := &consolev1.AttachConsoleResponse{Opened: !opened, Data: out.Data, Offset: out.Offset, Log: out.Log}
			opened = true
			return stream.Send(m)
		},
	})
}

func (r *server) ReadScreenshot(in *consolev1.ReadScreenshotRequest, stream grpc.ServerStreamingServer[consolev1.ReadScreenshotResponse]) error {
	t, err := auth.Admit(stream.Context(), service+"ReadScreenshot", in.GetOrgId(), in.GetProjectId())
	if err != nil {
		return err
	}
	return r.s.Screenshot(stream.Context(), t, cloud.VMID(in.GetVmId()), func(data []byte) error {
		return stream.Send(&consolev1.ReadScreenshotResponse{Data: data})
	})
}

func (r *server) CreateConsoleTicket(ctx context.Context, in *consolev1.CreateConsoleTicketRequest) (*consolev1.CreateConsoleTicketResponse, error) {
	t, err := auth.Admit(ctx, service+"CreateConsoleTicket", in.GetOrgId(), in.GetProjectId())
	if err != nil {
		return nil, err
	}
	kind, err := kindOf(in.GetKind())
	if err != nil {
		return nil, err
	}
	q := Session{VM: cloud.VMID(in.GetVmId()), Kind: kind, ReadOnly: in.GetReadOnly(), TakeOver: in.GetTakeOver()}
	ticket, err := r.s.CreateTicket(ctx, t, q, auth.TokenOf(ctx))
	if err != nil {
		return nil, err
	}
	return &consolev1.CreateConsoleTicketResponse{
		Ticket: ticket.Text, Path: socketPath + "?ticket=" + url.QueryEscape(ticket.Text), ExpiresAt: ticket.Expires,
	}, nil
}

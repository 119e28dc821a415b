package vm

import (
	"context"

	"google.golang.org/protobuf/types/known/emptypb"

	guestv1 "github.com/trivet-cloud/trivet/protos/guest/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// guestServer implements GuestService for API callers.
type guestServer struct {
	guestv1.UnsafeGuestServiceServer
	s *Service
}

const guestService = "/guest.v1.GuestService/"

func admitGuest(ctx context.Context, method auth.Method, in request) (cloud.Tenant, error) {
	return auth.Admit(ctx, guestService+method, in.GetOrgId(), in.GetProjectId())
}

func (r *guestServer) SetGuestPassword(ctx context.Context, in *guestv1.SetGuestPasswordRequest) (*emptypb.Empty, error) {
	t, err := admitGuest(ctx, "SetGuestPassword", in)
	if err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, r.s.SetGuestPassword(ctx, t, cloud.VMID(in.GetVmId()), in.GetUsername(), in.GetPassword())
}

func (r *guestServer) AddGuestSshKeys(ctx context.Context, in *guestv1.AddGuestSshKeysRequest) (*emptypb.Empty, error) {
	t, err := admitGuest(ctx, "AddGuestSshKeys", in)
	if err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, r.s.AddGuestSSHKeys(ctx, t, cloud.VMID(in.GetVmId()), in.GetUsername(), in.GetKeys(), in.GetReplace())
}

func (r *guestServer) RunGuestCommand(ctx context.Context, in *guestv1.RunGuestCommandRequest) (*guestv1.RunGuestCommandResponse, error) {
	t, err := admitGuest(ctx, "RunGuestCommand", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.RunInGuest(ctx, t, cloud.VMID(in.GetVmId()), guestProgram{in.GetCommand(), in.GetStdin(), in.GetTimeoutSeconds()})
	if err != nil {
		return nil, err
	}
	return &guestv1.RunGuestCommandResponse{
		ExitCode: out.GetExitCode(), Signal: out.GetSignal(), Stdout: out.GetStdout(), Stderr: out.GetStderr(),
		StdoutTruncated: out.GetStdoutTruncated(), StderrTruncated: out.GetStderrTruncated(),
	}, nil
}

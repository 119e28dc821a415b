package operator

import (
	"context"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func (s *server) RenameVm(ctx context.Context, in *operatorv1.RenameVmRequest) (*operatorv1.RenameVmResponse, error) {
	t, err := auth.Admit(ctx, service+"RenameVm", in.GetOrgId(), in.GetProjectId())
	if err != nil {
		return nil, err
	}
	renamed, err := s.opts.VMs.Rename(ctx, t, cloud.VMID(in.GetVmId()), in.GetName())
	if err != nil {
		return nil, err
	}
	return &operatorv1.RenameVmResponse{Vm: vm.ForCaller(ctx, &renamed, nil)}, nil
}

package operator

import (
	"context"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func (s *server) GetDrain(ctx context.Context, in *operatorv1.GetDrainRequest) (*operatorv1.GetDrainResponse, error) {
	if _, err := auth.Admit(ctx, service+"GetDrain", "", ""); err != nil {
		return nil, err
	}
	p, err := s.opts.VMs.GetDrain(ctx, cloud.NodeID(in.GetNodeId()))
	if err != nil {
		return nil, err
	}
	out := &operatorv1.GetDrainResponse{BootId: p.BootID}
	if d := p.Drain; d != nil {
		out.Drain = &operatorv1.Drain{
			Phase: d.Phase.String(), RequestedBy: d.By, Force: d.Force, BeganAt: d.Began, Deadline: d.Deadline, EndedAt: d.Ended, Result: d.Result,
		}
		for _, vm := range p.VMs {
			out.Drain.Vms = append(out.Drain.Vms, &operatorv1.DrainedVm{
				VmId: string(vm.ID), Name: vm.Name, OrgId: string(vm.Org), ProjectId: string(vm.Project), Status: vm.Status.String(),
				Reason: vm.Reason, FailedTries: uint32(vm.Tries), ToNodeId: string(vm.To), To: vm.ToName,
				TotalBytes: vm.TotalBytes, SentBytes: vm.SentBytes,
			})
		}
	}
	return out, nil
}

func (s *server) CancelDrain(ctx context.Context, in *operatorv1.CancelDrainRequest) (*operatorv1.CancelDrainResponse, error) {
	if _, err := auth.Admit(ctx, service+"CancelDrain", "", ""); err != nil {
		return nil, err
	}
	if err := s.opts.Nodes.CancelDrain(ctx, cloud.NodeID(in.GetNodeId())); err != nil {
		return nil, err
	}
	return &operatorv1.CancelDrainResponse{}, nil
}

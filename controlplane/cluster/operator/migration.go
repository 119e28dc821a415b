package operator

import (
	"context"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func (s *server) GetMigration(ctx context.Context, in *operatorv1.GetMigrationRequest) (*operatorv1.GetMigrationResponse, error) {
	t, err := auth.Admit(ctx, service+"GetMigration", in.GetOrgId(), in.GetProjectId())
	if err != nil {
		return nil, err
	}
	m, err := s.opts.VMs.GetMigration(ctx, t, cloud.VMID(in.GetVmId()))
	if err != nil {
		return nil, err
	}
	return &operatorv1.GetMigrationResponse{Migration: migrationToProto(m)}, nil
}

func (s *server) CancelMigration(ctx context.Context, in *operatorv1.CancelMigrationRequest) (*operatorv1.CancelMigrationResponse, error) {
	t, err := auth.Admit(ctx, service+"CancelMigration", in.GetOrgId(), in.GetProjectId())
	if err != nil {
		return nil, err
	}
	if _, err := s.opts.VMs.CancelMigration(ctx, t, cloud.VMID(in.GetVmId())); err != nil {
		return nil, err
	}
	return &operatorv1.CancelMigrationResponse{}, nil
}

// migrationToProto converts a VM's migration, or the result of its last one. It returns nil if the VM was never
// migrated.
func migrationToProto(in vm.Migration) *operatorv1.Migration {
	if m := in.VM.Migration; m != nil {
		return &operatorv1.Migration{
			Attempt: m.Attempt, SourceNodeId: string(m.Source), TargetNodeId: string(m.Target), Phase: m.Phase.String(),
			BeganAt: m.Began, Deadline: m.Deadline, Reason: m.Reason, TotalBytes: in.TotalBytes, SentBytes: in.SentBytes,
			DowntimeMs: m.DowntimeMS,
		}
	}
	r := in.VM.LastMigration
	if r == nil {
		return nil
	}
	return &operatorv1.Migration{
		Attempt: r.Attempt, SourceNodeId: string(r.Source), TargetNodeId: string(r.Target), BeganAt: r.Began, EndedAt: r.Ended,
		Moved: r.Moved, Reason: r.Reason, DowntimeMs: r.DowntimeMS,
	}
}

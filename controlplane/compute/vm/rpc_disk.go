package vm

import (
	"context"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
)

func (r *server) AttachDisk(ctx context.Context, in *vmv1.AttachDiskRequest) (*vmv1.VirtualMachine, error) {
	t, err := admit(ctx, "AttachDisk", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.AttachDisk(ctx, t, cloud.VMID(in.GetVmId()), convert.DiskFrom(in.GetDisk()), rpc.BodyHash(in))
	return r.powerResult(ctx, out, err)
}

func (r *server) DetachDisk(ctx context.Context, in *vmv1.DetachDiskRequest) (*vmv1.VirtualMachine, error) {
	t, err := admit(ctx, "DetachDisk", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.DetachDisk(ctx, t, cloud.VMID(in.GetVmId()), in.GetDiskId(), rpc.BodyHash(in))
	return r.powerResult(ctx, out, err)
}

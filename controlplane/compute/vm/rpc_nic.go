package vm

import (
	"context"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
)

func (r *server) AttachNic(ctx context.Context, in *vmv1.AttachNicRequest) (*vmv1.VirtualMachine, error) {
	t, err := admit(ctx, "AttachNic", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.AttachNIC(ctx, t, cloud.VMID(in.GetVmId()), convert.NICFrom(in.GetNic()), rpc.BodyHash(in))
	return r.powerResult(ctx, out, err)
}

func (r *server) DetachNic(ctx context.Context, in *vmv1.DetachNicRequest) (*vmv1.VirtualMachine, error) {
	t, err := admit(ctx, "DetachNic", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.DetachNIC(ctx, t, cloud.VMID(in.GetVmId()), in.GetNicId(), rpc.BodyHash(in))
	return r.powerResult(ctx, out, err)
}

package vm

import (
	"context"

	"google.golang.org/grpc"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
)

const viewService = "/operator.v1.VmViewService/"

// viewServer implements VmViewService.
type viewServer struct {
	operatorv1.UnsafeVmViewServiceServer
	server
}

func (r *viewServer) ListAllVms(ctx context.Context, in *operatorv1.ListAllVmsRequest) (*operatorv1.ListAllVmsResponse, error) {
	if _, err := auth.Admit(ctx, viewService+"ListAllVms", "", ""); err != nil {
		return nil, err
	}
	list, next, err := r.s.ListAll(ctx, in.GetPageSize(), in.GetPageToken(), in.GetFilter())
	if err != nil {
		return nil, err
	}
	out := &operatorv1.ListAllVmsResponse{NextPageToken: next}
	for _, vm := range list {
		out.Vms = append(out.Vms, convert.VM(vm, nil))
	}
	return out, nil
}

func (r *viewServer) WatchVms(in *operatorv1.WatchVmsRequest, stream grpc.ServerStreamingServer[operatorv1.WatchVmsResponse]) error {
	t, err := auth.Admit(stream.Context(), viewService+"WatchVms", in.GetOrgId(), in.GetProjectId())
	if err != nil {
		return err
	}
	return r.s.WatchList(stream.Context(), t, in.GetFilter(), func(c ListChange) error {
		return stream.Send(&operatorv1.WatchVmsResponse{Change: listChange(stream.Context(), c)})
	})
}

func (r *viewServer) WatchAllVms(in *operatorv1.WatchAllVmsRequest, stream grpc.ServerStreamingServer[operatorv1.WatchAllVmsResponse]) error {
	if _, err := auth.Admit(stream.Context(), viewService+"WatchAllVms", "", ""); err != nil {
		return err
	}
	return r.s.WatchAll(stream.Context(), in.GetFilter(), func(c ListChange) error {
		return stream.Send(&operatorv1.WatchAllVmsResponse{Change: listChange(stream.Context(), c)})
	})
}

func listChange(ctx context.Context, c ListChange) *operatorv1.VmListChange {
	out := &operatorv1.VmListChange{Type: operatorv1.VmListChangeType(c.Type), VmId: string(c.ID), Timestamp: c.At}
	if c.VM != nil {
		out.Vm = ForCaller(ctx, c.VM, nil)
	}
	return out
}

func (r *viewServer) GetVmDetails(ctx context.Context, in *operatorv1.GetVmDetailsRequest) (*operatorv1.GetVmDetailsResponse, error) {
	t, err := auth.Admit(ctx, viewService+"GetVmDetails", in.GetOrgId(), in.GetProjectId())
	if err != nil {
		return nil, err
	}
	vm, host, err := r.s.Details(ctx, t, cloud.VMID(in.GetVmId()))
	if err != nil {
		return nil, err
	}
	out := &operatorv1.GetVmDetailsResponse{Vm: r.toProto(ctx, vm), NodeName: host, CpuModel: vm.CPUModel()}
	out.GuestAddresses = vm.Unassigned(out.GetVm().GetStatus().GetIpAddresses())
	if c := vm.Choice; c != nil && c.Node == vm.Node {
		out.Placement = &operatorv1.Placement{ChosenAt: c.At, Reason: c.Reason}
	}
	if vm.State == cloud.Pending {
		out.Waiting = vm.Status.LastError
	}
	for _, h := range vm.History {
		out.Transitions = append(out.Transitions, &operatorv1.VmTransition{
			Timestamp: h.At, From: vmv1.VmState(h.From), To: vmv1.VmState(h.To), Cause: h.Cause(), Error: h.Error,
		})
	}
	return out, nil
}

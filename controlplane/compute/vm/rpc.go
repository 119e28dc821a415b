package vm

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	guestv1 "github.com/trivet-cloud/trivet/protos/guest/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Register registers VmService, VmViewService and GuestService for API callers.
func (s *Service) Register(g grpc.ServiceRegistrar) {
	vmv1.RegisterVmServiceServer(g, &server{s: s})
	operatorv1.RegisterVmViewServiceServer(g, &viewServer{server: server{s: s}})
	guestv1.RegisterGuestServiceServer(g, &guestServer{s: s})
}

type server struct {
	vmv1.UnsafeVmServiceServer
	s *Service
}

const service = "/vmcontroller.v1.VmService/"

// request is implemented by every request of VmService.
type request interface {
	GetOrgId() string
	GetProjectId() string
}

func admit(ctx context.Context, method auth.Method, in request) (cloud.Tenant, error) {
	return auth.Admit(ctx, service+method, in.GetOrgId(), in.GetProjectId())
}

// toProto converts a VM for the caller, with the usage that its host has reported.
func (r *server) toProto(ctx context.Context, vm *cloud.VM) *vmv1.VirtualMachine {
	if u, ok := r.s.Usage(ctx, vm)[vm.ID]; ok {
		return ForCaller(ctx, vm, &u)
	}
	return ForCaller(ctx, vm, nil)
}

// ForCaller converts a VM for the caller. Only a system:admin gets status.host_pid: a process ID is a fact about the host,
// and of no use without access to it.
func ForCaller(ctx context.Context, vm *cloud.VM, u *cloud.Usage) *vmv1.VirtualMachine {
	out := convert.VM(vm, u)
	if out.GetStatus() != nil && !auth.CallerOf(ctx).Has(cloud.SystemAdmin, cloud.Tenant{}) {
		out.Status.HostPid = 0
	}
	return out
}

func (r *server) CreateVm(ctx context.Context, in *vmv1.CreateVmRequest) (*vmv1.VirtualMachine, error) {
	t, err := admit(ctx, "CreateVm", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.Create(ctx, t, CreateRequest{
		Name: in.GetName(), Spec: convert.SpecFrom(in.GetSpec()), Hypervisor: convert.Hypervisor(in.GetHypervisor()),
		Metadata: in.GetMetadata(), Labels: in.GetLabels(),
	}, rpc.BodyHash(in))
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, out.Replayed)
	return ForCaller(ctx, &out.VM, nil), nil
}

func (r *server) GetVm(ctx context.Context, in *vmv1.GetVmRequest) (*vmv1.VirtualMachine, error) {
	t, err := admit(ctx, "GetVm", in)
	if err != nil {
		return nil, err
	}
	vm, err := r.s.Get(ctx, t, cloud.VMID(in.GetVmId()))
	if err != nil {
		return nil, err
	}
	return r.toProto(ctx, vm), nil
}

func (r *server) ListVms(ctx context.Context, in *vmv1.ListVmsRequest) (*vmv1.ListVmsResponse, error) {
	t, err := admit(ctx, "ListVms", in)
	if err != nil {
		return nil, err
	}
	list, next, err := r.s.List(ctx, t, in.GetPageSize(), in.GetPageToken(), in.GetFilter())
	if err != nil {
		return nil, err
	}
	usage := r.s.Usage(ctx, list...)
	out := &vmv1.ListVmsResponse{NextPageToken: next}
	for _, vm := range list {
		if u, ok := usage[vm.ID]; ok {
			out.Vms = append(out.Vms, ForCaller(ctx, vm, &u))
		} else {
			out.Vms = append(out.Vms, ForCaller(ctx, vm, nil))
		}
	}
	return out, nil
}

func (r *server) UpdateVm(ctx context.Context, in *vmv1.UpdateVmRequest) (*vmv1.VirtualMachine, error) {
	t, err := admit(ctx, "UpdateVm", in)
	if err != nil {
		return nil, err
	}
	c := Change{Metadata: in.GetMetadata(), Labels: in.GetLabels()}
	if in.GetSpec() != nil {
		spec := convert.SpecFrom(in.GetSpec())
		c.CPU, c.Memory, c.Disks, c.Network = spec.CPU, spec.Memory, spec.Disks, spec.Network
		if in.GetSpec().GetBoot() != nil {
			c.Boot = &spec.Boot
		}
		if in.GetSpec().GetSecurity() != nil {
			c.Security = &spec.Security
		}
	}
	vm, err := r.s.Update(ctx, t, cloud.VMID(in.GetVmId()), c)
	if err != nil {
		return nil, err
	}
	return r.toProto(ctx, &vm), nil
}

func (r *server) DeleteVm(ctx context.Context, in *vmv1.DeleteVmRequest) (*emptypb.Empty, error) {
	t, err := admit(ctx, "DeleteVm", in)
	if err != nil {
		return nil, err
	}
	replayed, err := r.s.Delete(ctx, t, cloud.VMID(in.GetVmId()), in.GetForce(), rpc.BodyHash(in))
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, replayed)
	return &emptypb.Empty{}, nil
}

// powerResult converts the result of a power call to its response, which is the current VM. A wait that timed out is
// not an error.
func (r *server) powerResult(ctx context.Context, out PowerResult, err error) (*vmv1.VirtualMachine, error) {
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, out.Replayed)
	return r.toProto(ctx, out.VM), nil
}

func (r *server) StartVm(ctx context.Context, in *vmv1.StartVmRequest) (*vmv1.VirtualMachine, error) {
	t, err := admit(ctx, "StartVm", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.Start(ctx, t, cloud.VMID(in.GetVmId()), rpc.BodyHash(in))
	return r.powerResult(ctx, out, err)
}

func (r *server) StopVm(ctx context.Context, in *vmv1.StopVmRequest) (*vmv1.VirtualMachine, error) {
	t, err := admit(ctx, "StopVm", in)
	if err != nil {
		return nil, err
	}
	seconds := in.GetTimeoutSeconds()
	switch {
	case seconds > cloud.MaxStopSeconds:
		return nil, fault.Invalid("timeout_seconds", "at most %d, got %d", cloud.MaxStopSeconds, seconds)
	case in.GetForce():
		seconds = 0
	case seconds == 0:
		seconds = cloud.DefaultStop / 1000
	}
	out, err := r.s.Stop(ctx, t, cloud.VMID(in.GetVmId()), time.Duration(seconds)*time.Second, rpc.BodyHash(in))
	return r.powerResult(ctx, out, err)
}

func (r *server) RebootVm(ctx context.Context, in *vmv1.RebootVmRequest) (*vmv1.VirtualMachine, error) {
	t, err := admit(ctx, "RebootVm", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.Reboot(ctx, t, cloud.VMID(in.GetVmId()), rpc.BodyHash(in))
	return r.powerResult(ctx, out, err)
}

func (r *server) ResetVm(ctx context.Context, in *vmv1.ResetVmRequest) (*vmv1.VirtualMachine, error) {
	t, err := admit(ctx, "ResetVm", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.Reset(ctx, t, cloud.VMID(in.GetVmId()), rpc.BodyHash(in))
	return r.powerResult(ctx, out, err)
}

func (r *server) WatchVm(in *vmv1.WatchVmRequest, stream grpc.ServerStreamingServer[vmv1.VmEvent]) error {
	t, err := admit(stream.Context(), "WatchVm", in)
	if err != nil {
		return err
	}
	return r.s.Watch(stream.Context(), t, cloud.VMID(in.GetVmId()), func(m rpc.Lazy) error { return stream.SendMsg(m) })
}

func (r *server) RecoverVm(ctx context.Context, in *vmv1.RecoverVmRequest) (*vmv1.VirtualMachine, error) {
	t, err := admit(ctx, "RecoverVm", in)
	if err != nil {
		return nil, err
	}
	var w *CreateRequest
	if in.GetSpec() != nil {
		w = &CreateRequest{
			Name: in.GetName(), Spec: convert.SpecFrom(in.GetSpec()), Hypervisor: convert.Hypervisor(in.GetHypervisor()),
			Metadata: in.GetMetadata(), Labels: in.GetLabels(),
		}
	}
	vm, err := r.s.RecoverVM(ctx, t, cloud.VMID(in.GetVmId()), w, in.GetStart(), rpc.BodyHash(in))
	if err != nil {
		return nil, err
	}
	return ForCaller(ctx, &vm, nil), nil
}

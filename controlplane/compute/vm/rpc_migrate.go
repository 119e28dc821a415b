package vm

import (
	"context"
	"net"
	"strings"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func (r *server) MigrateVm(ctx context.Context, in *vmv1.MigrateVmRequest) (*vmv1.VirtualMachine, error) {
	t, err := admit(ctx, "MigrateVm", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.Migrate(ctx, t, cloud.VMID(in.GetVmId()), cloud.NodeID(in.GetDestinationNodeId()), in.GetTimeoutSeconds(), in.GetWait(), rpc.BodyHash(in))
	return r.powerResult(ctx, out, err)
}

// PrepareVmMigration begins a migration to the host that listen_uri names, and returns the VM. If the VM has a
// migration to this host in the phase PREPARE already, it changes nothing. It returns FailedPrecondition if the VM is
// being migrated to another host.
func (r *server) PrepareVmMigration(ctx context.Context, in *vmv1.PrepareVmMigrationRequest) (*vmv1.VirtualMachine, error) {
	t, err := admit(ctx, "PrepareVmMigration", in)
	if err != nil {
		return nil, err
	}
	if err := cloud.CheckUUID("vm_id", in.GetVmId()); err != nil {
		return nil, err
	}
	address, ok := strings.CutPrefix(in.GetListenUri(), "tcp:")
	host, _, err := net.SplitHostPort(address)
	if !ok || err != nil || host == "" {
		return nil, fault.Invalid("listen_uri", "must be tcp:<host>:<port>")
	}
	vm, err := r.s.Get(ctx, t, cloud.VMID(in.GetVmId()))
	if err != nil {
		return nil, err
	}
	target, err := r.s.opts.Nodes.Named(ctx, host)
	if err != nil {
		return nil, err
	}
	switch m := vm.Migration; {
	case m != nil && m.Target != target:
		return nil, fault.New(fault.FailedPrecondition, "VM %s is being migrated to another host, %s: wait until the migration has ended, or cancel it",
			vm.Name, m.Target).WithReason(ReasonOtherTarget)
	case m != nil && m.Phase == cloud.MigrationPrepare:
		return r.toProto(ctx, vm), nil
	}
	out, err := r.s.Migrate(ctx, t, vm.ID, target, 0, false, rpc.BodyHash(in))
	return r.powerResult(ctx, out, err)
}

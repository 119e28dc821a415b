package vm

import (
	"testing"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestRPCArguments makes gRPC calls with invalid arguments: unknown enumeration values and values beyond limits. It
// also calls PrepareVmMigration as a caller who may not. Each error must name the field. No call may change the VM.
func TestRPCArguments(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Running, "web")
	r := &server{s: w.vms}
	ctx := w.as(acme, "")
	id, nowhere := string(vm.ID), string(newID())
	blank := &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}
	volume := &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: nowhere}}
	create := func(in *vmv1.CreateVmRequest) error {
		in.Name = "x"
		_, err := r.CreateVm(ctx, in)
		return err
	}
	disk := func(d *vmv1.DiskSpec) error {
		return create(&vmv1.CreateVmRequest{Spec: &vmv1.VmSpec{Disks: []*vmv1.DiskSpec{d}}})
	}
	only := func(_ any, err error) error { return err }
	for _, c := range []struct {
		name  string
		err   error
		kind  fault.Kind
		field string
	}{
		{"an unknown hypervisor", create(&vmv1.CreateVmRequest{Hypervisor: 77}), fault.InvalidArgument, "hypervisor"},
		{"a negative hypervisor", create(&vmv1.CreateVmRequest{Hypervisor: -1}), fault.InvalidArgument, "hypervisor"},
		{"a hypervisor value that would be KVM if cut to 8 bits", create(&vmv1.CreateVmRequest{Hypervisor: 257}), fault.InvalidArgument, "hypervisor"},
		{"an unknown bus", disk(&vmv1.DiskSpec{Id: "a", Source: blank, SizeGib: 1, Bus: 257}), fault.InvalidArgument, "spec.disks[a].bus"},
		{"an unknown cache", disk(&vmv1.DiskSpec{Id: "a", Source: blank, SizeGib: 1, Cache: 4}), fault.InvalidArgument, "spec.disks[a].cache"},
		{"a disk without a source", disk(&vmv1.DiskSpec{Id: "a", SizeGib: 1}), fault.InvalidArgument, "spec.disks[a].source"},
		{"a source with blank: false", disk(&vmv1.DiskSpec{Id: "a", SizeGib: 1, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{}}}), fault.InvalidArgument, "spec.disks[a].source"},
		{"a disk without a size", disk(&vmv1.DiskSpec{Id: "a", Source: blank}), fault.InvalidArgument, "spec.disks[a].size_gib"},
		{"an unknown NIC model", create(&vmv1.CreateVmRequest{Spec: &vmv1.VmSpec{Network: []*vmv1.NetworkSpec{{Id: "n", Model: 99}}}}), fault.InvalidArgument, "spec.network[0].model"},
		{"another org", create(&vmv1.CreateVmRequest{OrgId: "evil"}), fault.NotFound, ""},
		{"a stop of more than 600 s", only(r.StopVm(ctx, &vmv1.StopVmRequest{VmId: id, TimeoutSeconds: 601})), fault.InvalidArgument, "timeout_seconds"},
		{"a forced stop of more than 600 s", only(r.StopVm(ctx, &vmv1.StopVmRequest{VmId: id, TimeoutSeconds: 601, Force: true})), fault.InvalidArgument, "timeout_seconds"},
		{"migrate", only(r.MigrateVm(ctx, &vmv1.MigrateVmRequest{VmId: id, DestinationNodeId: nowhere})), fault.FailedPrecondition, ""},
		{"migrate to a host without a valid ID", only(r.MigrateVm(ctx, &vmv1.MigrateVmRequest{VmId: id, DestinationNodeId: "x"})), fault.InvalidArgument, "destination_node_id"},
		{"migrate for more than a day", only(r.MigrateVm(ctx, &vmv1.MigrateVmRequest{VmId: id, TimeoutSeconds: 86401})), fault.InvalidArgument, "timeout_seconds"},
		{"prepare a migration, an internal call", only(r.PrepareVmMigration(ctx, &vmv1.PrepareVmMigrationRequest{VmId: id, ListenUri: "tcp:h:1"})), fault.PermissionDenied, ""},
		{"recover an unknown VM without a spec", only(r.RecoverVm(ctx, &vmv1.RecoverVmRequest{VmId: nowhere})), fault.NotFound, ""},
		{"recover a VM whose host answers", only(r.RecoverVm(ctx, &vmv1.RecoverVmRequest{VmId: id})), fault.FailedPrecondition, ""},
		{"recover a VM that exists with a spec", only(r.RecoverVm(ctx, &vmv1.RecoverVmRequest{VmId: id, Name: "x", Spec: &vmv1.VmSpec{}})), fault.InvalidArgument, "spec"},
		{"recover without a name", only(r.RecoverVm(ctx, &vmv1.RecoverVmRequest{VmId: nowhere, Spec: &vmv1.VmSpec{}})), fault.InvalidArgument, "name"},
		{"recover with another hypervisor", only(r.RecoverVm(ctx, &vmv1.RecoverVmRequest{VmId: nowhere, Name: "x", Spec: &vmv1.VmSpec{}, Hypervisor: 2})), fault.InvalidArgument, "hypervisor"},
		{"attach without a disk", only(r.AttachDisk(ctx, &vmv1.AttachDiskRequest{VmId: id})), fault.InvalidArgument, "disk.id"},
		{"attach a blank disk without a size", only(r.AttachDisk(ctx, &vmv1.AttachDiskRequest{VmId: id, Disk: &vmv1.DiskSpec{Id: "b", Source: blank}})), fault.InvalidArgument, "disk.size_gib"},
		{"attach a blank disk on a host without a pool", only(r.AttachDisk(ctx, &vmv1.AttachDiskRequest{VmId: id, Disk: &vmv1.DiskSpec{Id: "b", Source: blank, SizeGib: 1}})), fault.FailedPrecondition, ""},
		{"attach a disk to an unknown VM", only(r.AttachDisk(ctx, &vmv1.AttachDiskRequest{VmId: nowhere, Disk: &vmv1.DiskSpec{Id: "b", Source: volume}})), fault.NotFound, ""},
		{"detach without a disk", only(r.DetachDisk(ctx, &vmv1.DetachDiskRequest{VmId: id})), fault.InvalidArgument, "disk_id"},
		{"attach a volume that does not exist", only(r.AttachDisk(ctx, &vmv1.AttachDiskRequest{VmId: id, Disk: &vmv1.DiskSpec{Id: "b", Source: volume}})), fault.NotFound, ""},
		{"detach a disk that the VM has not", only(r.DetachDisk(ctx, &vmv1.DetachDiskRequest{VmId: id, DiskId: "b"})), fault.NotFound, "disk_id"},
		{"detach a disk that is not a volume", only(r.DetachDisk(ctx, &vmv1.DetachDiskRequest{VmId: id, DiskId: "a"})), fault.FailedPrecondition, ""},
		{"attach without a NIC", only(r.AttachNic(ctx, &vmv1.AttachNicRequest{VmId: id})), fault.InvalidArgument, "nic.id"},
		{"attach a NIC on a host without a network", only(r.AttachNic(ctx, &vmv1.AttachNicRequest{VmId: id, Nic: &vmv1.NetworkSpec{Id: "nic0"}})), fault.FailedPrecondition, ""},
		{"attach a NIC to an unknown VM", only(r.AttachNic(ctx, &vmv1.AttachNicRequest{VmId: nowhere, Nic: &vmv1.NetworkSpec{Id: "nic0"}})), fault.NotFound, ""},
		{"detach without a NIC", only(r.DetachNic(ctx, &vmv1.DetachNicRequest{VmId: id})), fault.InvalidArgument, "nic_id"},
		{"detach a NIC that the VM has not", only(r.DetachNic(ctx, &vmv1.DetachNicRequest{VmId: id, NicId: "nic0"})), fault.NotFound, "nic_id"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, ok := fault.From(c.err)
			require.True(t, ok && f.Kind == c.kind, "%v", c.err)
			require.Equal(t, c.field, f.Field)
		})
	}
	require.Equal(t, vm, w.get(vm.ID))
}

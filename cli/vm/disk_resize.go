package vm

import (
	"context"
	"io"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/volume"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

func resizeDiskCommand(s *session.Session) *cobra.Command {
	var size string
	c := &cobra.Command{
		Use: "resize VM DISK", Short: "Enlarge a disk of a VM", Args: session.Exactly("VM", "DISK"),
		Long: `Enlarge a disk of a VM. DISK is the ID of the disk in the VM, such as disk0. If the disk is a volume, the volume is
enlarged. A running guest sees the new size at once, and must enlarge its partitions and file systems itself. A VM that is
off gets the new size at its next start. Disks cannot be made smaller.`,
		Example:           "  trivet vm disk list web\n  trivet vm disk resize web disk0 --size 40",
		ValidArgsFunction: completeDevice(s, diskIDs),
	}
	c.Flags().StringVar(&size, "size", "", "new size in GiB, or with a unit: 2TiB")
	session.Require(c, "size")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		gib, err := volume.ParseSize(size)
		if err != nil {
			return err
		}
		vm, t, err := readVM(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		if vm, err = t.resizeDisk(ctx, conn, vm, args[1], gib); err != nil {
			return err
		}
		d := diskOf(vm, args[1])
		return s.Print(d, []string{d.GetId()}, func(w io.Writer) error { return list.Print(w, diskColumns(ctx, s, conn), d) })
	})
	return c
}

// resizeDisk sets the size of a disk, or of its volume, and returns the VM with the new size of the disk.
func (t *target) resizeDisk(ctx context.Context, conn *dial.Conn, vm *vmv1.VirtualMachine, id string, gib uint64) (*vmv1.VirtualMachine, error) {
	vm = proto.CloneOf(vm)
	d := diskOf(vm, id)
	if d == nil {
		return nil, session.Errorf(codes.NotFound, "`trivet vm disk list "+vm.GetName()+"` shows the disks", "VM %s has no disk %s", vm.GetName(), id)
	}
	d.SizeGib = gib
	if v := d.GetSource().GetVolumeId(); v != "" {
		_, err := vmv1.NewVolumeServiceClient(conn).ResizeVolume(ctx, &vmv1.ResizeVolumeRequest{
			OrgId: t.org, ProjectId: t.project, VolumeId: v, SizeGib: gib,
		})
		return vm, err
	}
	return t.client.UpdateVm(ctx, &vmv1.UpdateVmRequest{
		OrgId: t.org, ProjectId: t.project, VmId: t.id, Spec: &vmv1.VmSpec{Disks: vm.GetSpec().GetDisks()},
	})
}

// diskOf returns the disk of a VM with this ID, or nil.
func diskOf(vm *vmv1.VirtualMachine, id string) *vmv1.DiskSpec {
	for _, d := range vm.GetSpec().GetDisks() {
		if d.GetId() == id {
			return d
		}
	}
	return nil
}

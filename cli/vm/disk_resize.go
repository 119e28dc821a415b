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
		d, err := t.resizeDisk(ctx, conn, vm, args[1], gib)
		if err != nil {
			return err
		}
		return s.Print(d, []string{d.GetId()}, func(w io.Writer) error { return list.Print(w, diskColumns(ctx, s, conn), d) })
	})
	return c
}

// resizeDisk sets the size of a disk, or of its volume, and returns the disk with the new size.
func (t *target) resizeDisk(ctx context.Context, conn *dial.Conn, vm *vmv1.VirtualMachine, id string, gib uint64) (*vmv1.DiskSpec, error) {
	d := diskOf(vm, id)
	if d == nil {
		return nil, session.Errorf(codes.NotFound, "`trivet vm disk list "+vm.GetName()+"` shows the disks", "VM %s has no disk %s", vm.GetName(), id)
	}
	if v := d.GetSource().GetVolumeId(); v != "" {
		d = proto.CloneOf(d)
		d.SizeGib = gib
		_, err := vmv1.NewVolumeServiceClient(conn).ResizeVolume(ctx, &vmv1.ResizeVolumeRequest{
			OrgId: t.org, ProjectId: t.project, VolumeId: v, SizeGib: gib,
		})
		return d, err
	}
	out, err := (&change{diskSizes: map[string]uint64{id: gib}}).update(ctx, t)
	return diskOf(out, id), err
}

// withSizes returns copies of disks with new sizes in GiB, by the ID of the disk.
func withSizes(disks []*vmv1.DiskSpec, sizes map[string]uint64) []*vmv1.DiskSpec {
	out := make([]*vmv1.DiskSpec, len(disks))
	for i, d := range disks {
		out[i] = proto.CloneOf(d)
		if gib, changes := sizes[d.GetId()]; changes {
			out[i].SizeGib = gib
		}
	}
	return out
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

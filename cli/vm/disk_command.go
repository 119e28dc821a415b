package vm

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/image"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	"github.com/trivet-cloud/trivet/cli/volume"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// diskLimit is the deadline of the commands that attach and detach disks. The control plane waits up to 45 s before it
// answers such a call.
const diskLimit = 45*time.Second + waitMargin

// diskCommand returns the command `trivet vm disk`.
func diskCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "disk", Short: "Attach, detach and list the disks of a VM", Args: cobra.NoArgs,
		Long: `Attach existing or new volumes to a VM as disks, detach them, and list the VM's disks. Disks that were made
with the VM cannot be detached. They are deleted with the VM.`,
		Example: `  trivet vm disk attach web --volume data
  trivet vm disk list web
  trivet vm disk detach web disk1`,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(attachDiskCommand(s), detachDiskCommand(s), resizeDiskCommand(s), listDisksCommand(s))
	return c
}

func attachDiskCommand(s *session.Session) *cobra.Command {
	var name, from, size, id, bus, cache string
	var boot uint32
	var wait session.Waiting
	c := vmArgCommand(s, "attach VM", "Attach a disk to a VM")
	c.Long = `Attach a disk to a VM that is stopped or running. The disk is an existing volume or a new volume. A new
volume is blank or begins with the content of an image. It gets the default storage class and the name VM-DISK, made of
the name of the VM and the ID of the disk. The volume is not deleted when the disk is detached or the VM is deleted. A
running VM can get disks on the buses virtio and scsi.`
	c.Example = `  trivet vm disk attach web --volume data
  trivet vm disk attach web --size 20
  trivet vm disk attach web --image debian --size 20`
	p := c.Flags()
	p.StringVar(&name, "volume", "", "existing volume, by name or ID")
	p.StringVar(&size, "size", "", "size of a new volume in GiB, or with a unit: 2TiB")
	p.StringVar(&from, "image", "", "image for a new volume, by name or ID (default: a blank volume)")
	p.StringVar(&id, "id", "", "ID of the disk in the VM (default: the first free of disk0, disk1, ...)")
	p.StringVar(&bus, "bus", "virtio", "virtio, scsi, ide or sata")
	p.StringVar(&cache, "cache", "writeback", "none, writeback or writethrough")
	p.Uint32Var(&boot, "boot-index", 0, "lower boots first")
	wait.Add(c, true)
	session.RequireOne(c, "volume", "size")
	session.Exclusive(c, "volume", "size")
	session.Exclusive(c, "volume", "image")
	for flag, f := range map[string]cobra.CompletionFunc{
		"volume": volume.Names(s),
		"image":  image.Names(s),
		"bus":    cobra.FixedCompletions([]string{"virtio", "scsi", "ide", "sata"}, cobra.ShellCompDirectiveNoFileComp),
		"cache":  cobra.FixedCompletions([]string{"none", "writeback", "writethrough"}, cobra.ShellCompDirectiveNoFileComp),
	} {
		_ = c.RegisterFlagCompletionFunc(flag, f) // its only error is for an unknown flag
	}
	c.RunE = s.Run(diskLimit, func(ctx context.Context, conn *dial.Conn, args []string) error {
		d := &vmv1.DiskSpec{Id: id, Bus: buses[bus], Cache: caches[cache], BootIndex: boot}
		if d.GetBus() == 0 {
			return session.Usagef("--bus %q: want virtio, scsi, ide or sata", bus)
		}
		if d.GetCache() == 0 {
			return session.Usagef("--cache %q: want none, writeback or writethrough", cache)
		}
		var err error
		if d.Source, err = diskSource(ctx, s, conn, name, from); err != nil {
			return err
		}
		if name == "" {
			if d.SizeGib, err = volume.ParseSize(size); err != nil {
				return err
			}
		}
		return attachDisk(ctx, s, conn, args[0], d, &wait)
	})
	return c
}

// diskSource returns the source of a disk. name is the name or ID of a volume, and from is the name or ID of an image.
// If both are empty, the source is blank.
func diskSource(ctx context.Context, s *session.Session, conn *dial.Conn, name, from string) (*vmv1.DiskSource, error) {
	switch {
	case name != "":
		id, err := volume.Find(ctx, s, conn, name)
		return &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: id}}, err
	case from != "":
		id, err := image.Find(ctx, s, conn, from)
		return &vmv1.DiskSource{Source: &vmv1.DiskSource_ImageId{ImageId: id}}, err
	}
	return &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}, nil
}

func attachDisk(ctx context.Context, s *session.Session, conn *dial.Conn, nameOrID string, d *vmv1.DiskSpec, wait *session.Waiting) error {
	t, err := find(ctx, s, conn, nameOrID)
	if err != nil {
		return err
	}
	if d.Id == "" {
		vm, err := t.read(ctx)
		if err != nil {
			return err
		}
		d.Id = freeDiskID(vm.GetSpec().GetDisks())
	}
	vm, err := t.attachDisk(wait.Context(ctx), s, nameOrID, d)
	if err != nil {
		return err
	}
	attached := slices.DeleteFunc(slices.Clone(vm.GetSpec().GetDisks()), func(have *vmv1.DiskSpec) bool { return have.GetId() != d.GetId() })
	return s.Print(vm, []string{d.GetId()}, func(w io.Writer) error { return list.Print(w, diskColumns(ctx, s, conn), attached...) })
}

// attachDisk attaches a disk to the VM, whose name or ID is nameOrID, and returns the VM.
func (t *target) attachDisk(ctx context.Context, s *session.Session, nameOrID string, d *vmv1.DiskSpec) (vm *vmv1.VirtualMachine, err error) {
	goesOn := session.Ongoing{What: d.GetId() + " may still be attached", Look: "trivet vm disk list " + nameOrID}
	err = s.WaitOngoing("attaching "+d.GetId(), goesOn, func(func(string)) error {
		vm, err = t.client.AttachDisk(ctx, &vmv1.AttachDiskRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id, Disk: d})
		return err
	})
	return vm, err
}

// freeDiskID returns the first of disk0, disk1, … that no disk has.
func freeDiskID(disks []*vmv1.DiskSpec) string {
	for n := 0; ; n++ {
		id := fmt.Sprintf("disk%d", n)
		if !slices.ContainsFunc(disks, func(d *vmv1.DiskSpec) bool { return d.GetId() == id }) {
			return id
		}
	}
}

func detachDiskCommand(s *session.Session) *cobra.Command {
	var wait session.Waiting
	c := &cobra.Command{
		Use: "detach VM DISK", Short: "Detach a volume from a VM", Args: session.Exactly("VM", "DISK"),
		Long: `Detach a volume from a VM. DISK is the ID of the disk in the VM, such as disk1, or the
name or ID of the volume. A guest that runs must release the
device. The volume stays.`,
		Example:           "  trivet vm disk list web\n  trivet vm disk detach web disk1\n  trivet vm disk detach web data",
		ValidArgsFunction: completeDevice(s, diskIDs),
	}
	wait.Add(c, true)
	c.RunE = runDetach(s, diskLimit, &wait, diskIDs, func(ctx context.Context, conn *dial.Conn, t *target, disk string) (*vmv1.VirtualMachine, string, error) {
		detach := func(id string) (*vmv1.VirtualMachine, string, error) {
			vm, err := t.client.DetachDisk(ctx, &vmv1.DetachDiskRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id, DiskId: id})
			return vm, id, err
		}
		vm, id, err := detach(disk)
		if status.Code(err) != codes.NotFound {
			return vm, id, err
		}
		if byVolume := t.diskOfVolume(ctx, volume.NameOf(ctx, s, conn), disk); byVolume != "" {
			return detach(byVolume)
		}
		return vm, id, err
	})
	return c
}

// diskOfVolume returns the ID of the VM's disk that is the volume with a name or ID. It returns "" if there is none. names
// returns the name of a volume by its ID.
func (t *target) diskOfVolume(ctx context.Context, names func(id string) string, nameOrID string) string {
	vm, err := t.read(ctx)
	if err != nil {
		return ""
	}
	for _, d := range vm.GetSpec().GetDisks() {
		if id := d.GetSource().GetVolumeId(); id != "" && (id == nameOrID || names(id) == nameOrID) {
			return d.GetId()
		}
	}
	return ""
}

func listDisksCommand(s *session.Session) *cobra.Command {
	c := vmArgCommand(s, "list VM", "List the disks of a VM")
	var disks []*vmv1.DiskSpec
	kind := &list.Kind[*vmv1.DiskSpec]{
		Page: func(_ context.Context, _ *dial.Conn, q list.Query) ([]*vmv1.DiskSpec, string, error) {
			return list.Slice(disks, q)
		},
		Name:    (*vmv1.DiskSpec).GetId,
		Columns: diskColumns,
	}
	f := kind.AddFlags(s, c)
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		vm, _, err := readVM(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		disks = vm.GetSpec().GetDisks()
		return kind.List(ctx, s, conn, f)
	})
	return c
}

// diskColumns returns the columns of a table of disks. The name and the size of a volume are those in the list of the
// project's volumes, because the record of a VM does not have them.
func diskColumns(ctx context.Context, s *session.Session, conn *dial.Conn) []list.Column[*vmv1.DiskSpec] {
	type spec = *vmv1.DiskSpec
	images, volumes := image.NameOf(ctx, s, conn), volume.ByID(ctx, s, conn)
	volumeName := func(id string) string { return cmp.Or(volumes(id).GetName(), id) }
	source := func(image, volume func(string) string) func(spec) string {
		return func(d spec) string {
			switch src := d.GetSource().GetSource().(type) {
			case *vmv1.DiskSource_ImageId:
				return "image " + image(src.ImageId)
			case *vmv1.DiskSource_VolumeId:
				return "volume " + volume(src.VolumeId)
			}
			return "blank"
		}
	}
	same := func(id string) string { return id }
	bytes := func(d spec) uint64 {
		if id := d.GetSource().GetVolumeId(); id != "" {
			return volumes(id).GetSizeGib() << 30
		}
		return d.GetSizeGib() << 30
	}
	size := list.Size("SIZE", bytes)
	size.Text = func(d spec) string {
		if bytes(d) == 0 {
			return "" // a volume whose size is not known
		}
		return show.Bytes(bytes(d))
	}
	return []list.Column[spec]{
		{Name: "DISK", Text: spec.GetId},
		{Name: "SOURCE", Text: source(images, volumeName), Max: 30},
		{Name: "SOURCE ID", Text: source(same, same), In: list.InWide},
		size,
		{Name: "BUS", Text: func(d spec) string { return show.Enum("DISK_BUS", d.GetBus()) }},
		{Name: "CACHE", Text: func(d spec) string { return show.Enum("DISK_CACHE", d.GetCache()) }},
		list.Number("BOOT", spec.GetBootIndex),
	}
}

func diskIDs(vm *vmv1.VirtualMachine) (ids []string) {
	for _, d := range vm.GetSpec().GetDisks() {
		ids = append(ids, d.GetId())
	}
	return ids
}

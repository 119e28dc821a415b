// Package volume holds the commands for volumes, their snapshots and storage classes: `trivet volume`, `trivet
// snapshot` and `trivet storage-class`. Package cli/vm calls Find to resolve the volume names in its arguments. The
// name of a volume is unique in its project.
package volume

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/image"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/node"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	"github.com/trivet-cloud/trivet/cli/vm/lookup"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// callTimeout is the deadline of each command unless --timeout is given.
const callTimeout = 30 * time.Second

// Command returns the command `trivet volume`.
func Command(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "volume", Short: "Create, resize, export, import, register and delete block volumes", Args: cobra.NoArgs,
		Long: `Create, resize and delete block volumes. A volume exists independently of VMs, and one VM at a time can have it as a
disk: see ` + "`trivet vm disk attach`" + `. A volume of a class with the driver MANAGED stays on the host of the first VM that had
it, and only VMs on that host can have it.`,
		Example: `  trivet volume create data --size 100
  trivet vm disk attach web --volume data
  trivet volume resize data --size 200`,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(createCommand(s), listCommand(s), showCommand(s), updateCommand(s), resizeCommand(s), flattenCommand(s), exportCommand(s), importCommand(s), registerCommand(s), deleteCommand(s))
	return c
}

// createFlags are the flags of `trivet volume create`.
type createFlags struct {
	size, class, image, snapshot string
	labels, metadata             []string
}

func createCommand(s *session.Session) *cobra.Command {
	var f createFlags
	c := &cobra.Command{
		Use: "create NAME", Short: "Create a volume", Args: session.Exactly("NAME"),
		Long: `Create a volume that is blank or begins with the content of an image or a snapshot. A volume from a snapshot
gets the storage class of the snapshot's volume. A volume of the driver MANAGED that is not made from a snapshot is made
on its host when it is attached for the first time. Other volumes are made at once.`,
		Example: `  trivet volume create data --size 100
  trivet volume create data-2 --snapshot before-upgrade
  trivet volume create root --size 20 --image debian-12 --class fast`,
	}
	f.register(s, c)
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		v, err := f.create(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		return listed(s).PrintOne(ctx, s, conn, v)
	})
	return c
}

// register adds the flags to c.
func (f *createFlags) register(s *session.Session, c *cobra.Command) {
	p := c.Flags()
	p.StringVar(&f.size, "size", "", "size in GiB, or with a unit: 2TiB (default with --snapshot: the size of the snapshot)")
	p.StringVar(&f.class, "class", "", "storage class (default: the default class)")
	p.StringVar(&f.image, "image", "", "image with whose content the volume begins, by name or ID")
	p.StringArrayVar(&f.labels, "label", nil, "KEY=VALUE, repeatable")
	p.StringArrayVar(&f.metadata, "metadata", nil, "KEY=VALUE, repeatable")
	p.StringVar(&f.snapshot, "snapshot", "", "snapshot with whose content the volume begins, by name or ID")
	session.RequireOne(c, "size", "snapshot")
	session.Exclusive(c, "snapshot", "image")
	session.Exclusive(c, "snapshot", "class")
	_ = c.RegisterFlagCompletionFunc("snapshot", snapshotNames(s)) // its only error is for an unknown flag
	_ = c.RegisterFlagCompletionFunc("image", image.Names(s))      // its only error is for an unknown flag
}

// request returns a request with the values of all flags except the image and the snapshot.
func (f *createFlags) request(name string) (req *vmv1.CreateVolumeRequest, err error) {
	req = &vmv1.CreateVolumeRequest{Name: name, StorageClass: f.class}
	if err := cloud.CheckName("NAME", name); err != nil {
		return nil, session.Usagef("%v", err)
	}
	if f.size != "" {
		if req.SizeGib, err = ParseSize(f.size); err != nil {
			return nil, err
		}
	}
	if req.Labels, err = session.Pairs("label", f.labels); err != nil {
		return nil, err
	}
	req.Metadata, err = session.Pairs("metadata", f.metadata)
	return req, err
}

// create creates the volume that the flags describe.
func (f *createFlags) create(ctx context.Context, s *session.Session, conn *dial.Conn, name string) (*vmv1.Volume, error) {
	req, err := f.request(name)
	if err != nil {
		return nil, err
	}
	if f.image != "" {
		if req.ImageId, err = image.Find(ctx, s, conn, f.image); err != nil {
			return nil, err
		}
	}
	req.OrgId, req.ProjectId = s.Tenant()
	if f.snapshot != "" {
		return createFromSnapshot(ctx, s, conn, req, f.snapshot)
	}
	return vmv1.NewVolumeServiceClient(conn).CreateVolume(ctx, req)
}

// createFromSnapshot creates the volume that req describes, with the content of the snapshot with a name or ID.
func createFromSnapshot(
	ctx context.Context, s *session.Session, conn *dial.Conn, req *vmv1.CreateVolumeRequest, nameOrID string,
) (*vmv1.Volume, error) {
	id, err := image.FindSnapshot(ctx, s, conn, nameOrID)
	if err != nil {
		return nil, err
	}
	return storagev1.NewSnapshotServiceClient(conn).CreateVolumeFromSnapshot(ctx, &storagev1.CreateVolumeFromSnapshotRequest{
		OrgId: req.GetOrgId(), ProjectId: req.GetProjectId(), SnapshotId: id, Name: req.GetName(), SizeGib: req.GetSizeGib(),
		Metadata: req.GetMetadata(), Labels: req.GetLabels(),
	})
}

// ParseSize parses the value of the flag --size, a number of GiB.
func ParseSize(text string) (uint64, error) {
	gib, ok := session.Amount(text, session.GiB)
	if !ok || gib == 0 {
		return 0, session.Usagef("--size %q: want a number of GiB, or one with a unit: 2TiB", text)
	}
	return gib, nil
}

func listCommand(s *session.Session) *cobra.Command {
	var of scope
	c := listedIn(s, &of).Command(s, &cobra.Command{Use: "list", Short: "List the project's volumes",
		Example: "  trivet volume list --all-projects --host rack7"}, callTimeout)
	session.AllProjectsFlag(c, &of.all)
	c.Flags().StringVar(&of.host, "host", "", "list only volumes that are bound to this host, by name or ID")
	_ = c.RegisterFlagCompletionFunc("host", node.Names(s)) // its only error is for an unknown flag
	return c
}

// scope selects the volumes of a list: those of all projects if all is true, and those that are bound to a host, with a
// name or ID, if host is not empty.
type scope struct {
	all  bool
	host string
}

// listed describes the volumes of the project for lists.
func listed(s *session.Session) *list.Kind[*vmv1.Volume] { return listedIn(s, &scope{}) }

func listedIn(s *session.Session, of *scope) *list.Kind[*vmv1.Volume] {
	return &list.Kind[*vmv1.Volume]{
		Page: func(ctx context.Context, conn *dial.Conn, q list.Query) (_ []*vmv1.Volume, _ string, err error) {
			if of.host != "" {
				if of.host, err = node.Find(ctx, conn, of.host); err != nil { // the ID is used for the next page too
					return nil, "", err
				}
			}
			if of.all {
				req := &storagev1.ListAllVolumesRequest{NodeId: of.host, PageSize: q.Size, PageToken: q.Token}
				req.OrgId, req.ProjectId = s.Within()
				page, err := storagev1.NewVolumeServiceClient(conn).ListAllVolumes(ctx, req)
				return page.GetVolumes(), page.GetNextPageToken(), err
			}
			org, project := s.Tenant()
			page, err := vmv1.NewVolumeServiceClient(conn).ListVolumes(ctx, &vmv1.ListVolumesRequest{
				OrgId: org, ProjectId: project, PageSize: q.Size, PageToken: q.Token,
			})
			return page.GetVolumes(), page.GetNextPageToken(), err
		},
		Name: (*vmv1.Volume).GetName,
		Keep: func(v *vmv1.Volume) bool { return of.host == "" || v.GetAttachedToNode() == of.host },
		Columns: func(ctx context.Context, s *session.Session, conn *dial.Conn) []list.Column[*vmv1.Volume] {
			return append([]list.Column[*vmv1.Volume]{list.Tenant[*vmv1.Volume](of.all)}, columns(ctx, s, conn, of.all)...)
		},
	}
}

// columns returns the columns of a list of volumes. all is true for a list over all projects.
func columns(ctx context.Context, s *session.Session, conn *dial.Conn, all bool) []list.Column[*vmv1.Volume] {
	type volume = *vmv1.Volume
	vms := lookup.NameIn(ctx, s, conn, all)
	class := list.Column[volume]{Name: "CLASS", Text: volume.GetStorageClass, Max: 12}
	if all { // the tenants take the place of the classes
		class.In = list.InWide
	}
	return []list.Column[volume]{
		{Name: "NAME", Text: volume.GetName},
		{Name: "ID", Text: volume.GetId, In: list.InWide},
		{Name: "STATUS", Text: status},
		list.Size("SIZE", func(v volume) uint64 { return v.GetSizeGib() << 30 }),
		class,
		{Name: "VM", Text: func(v volume) string { return vms(v.GetAttachedToVm()) }, Max: 20},
		{Name: "VM ID", Text: volume.GetAttachedToVm, In: list.InWide},
		list.Age("AGE", s.Now, volume.GetCreatedAt),
		list.Time("CREATED", volume.GetCreatedAt, list.InWide),
		{Name: "LABELS", Text: func(v volume) string { return show.Pairs(v.GetLabels()) }, In: list.InWide},
	}
}

// NameOf returns a function that returns the name of a volume of the project by its ID.
func NameOf(ctx context.Context, s *session.Session, conn *dial.Conn) func(id string) string {
	return nameIn(ctx, s, conn, false)
}

// nameIn is like NameOf. If all is true, the function returns the names of the volumes of all projects.
func nameIn(ctx context.Context, s *session.Session, conn *dial.Conn, all bool) func(id string) string {
	return session.NameOf(func() (map[string]string, error) {
		volumes, err := listedIn(s, &scope{all: all}).All(ctx, conn)
		names := map[string]string{}
		for _, v := range volumes {
			names[v.GetId()] = v.GetName()
		}
		return names, err
	})
}

// ByID returns a function that returns a volume of the project by its ID, for output. It lists the volumes when the first
// one is needed. If the list fails or does not have the ID, the function returns nil.
func ByID(ctx context.Context, s *session.Session, conn *dial.Conn) func(id string) *vmv1.Volume {
	all := sync.OnceValue(func() map[string]*vmv1.Volume {
		volumes, _ := listedIn(s, &scope{}).All(ctx, conn) // without an answer, the output has IDs and no sizes
		byID := map[string]*vmv1.Volume{}
		for _, v := range volumes {
			byID[v.GetId()] = v
		}
		return byID
	})
	return func(id string) *vmv1.Volume { return all()[id] }
}

func showCommand(s *session.Session) *cobra.Command {
	c := argCommand(s, "show VOLUME", "Show a volume")
	session.Many(c)
	c.RunE = s.ShowEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		id, err := Find(ctx, s, conn, name)
		if err != nil {
			return err
		}
		org, project := s.Tenant()
		v, err := vmv1.NewVolumeServiceClient(conn).GetVolume(ctx, &vmv1.GetVolumeRequest{OrgId: org, ProjectId: project, VolumeId: id})
		if err != nil {
			return err
		}
		return s.Print(v, []string{v.GetName()}, func(w io.Writer) error { return show.Fields(w, fields(s.Now(), v)) })
	})
	return c
}

func resizeCommand(s *session.Session) *cobra.Command {
	var size string
	c := argCommand(s, "resize VOLUME", "Enlarge a volume")
	c.Long = `Enlarge a volume, also while a VM uses it. The guest must enlarge its partitions and file systems itself.`
	c.Example = "  trivet volume resize data --size 200"
	c.Flags().StringVar(&size, "size", "", "new size in GiB, or with a unit: 2TiB")
	session.Require(c, "size")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		gib, err := ParseSize(size)
		if err != nil {
			return err
		}
		id, err := Find(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		org, project := s.Tenant()
		v, err := vmv1.NewVolumeServiceClient(conn).ResizeVolume(ctx, &vmv1.ResizeVolumeRequest{
			OrgId: org, ProjectId: project, VolumeId: id, SizeGib: gib,
		})
		if err != nil {
			return err
		}
		return listed(s).PrintOne(ctx, s, conn, v)
	})
	return c
}

func deleteCommand(s *session.Session) *cobra.Command {
	c := argCommand(s, "delete VOLUME", "Delete a volume that no VM has")
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		id, err := Find(ctx, s, conn, name)
		if err != nil {
			return err
		}
		org, project := s.Tenant()
		if _, err := vmv1.NewVolumeServiceClient(conn).DeleteVolume(ctx, &vmv1.DeleteVolumeRequest{
			OrgId: org, ProjectId: project, VolumeId: id,
		}); err != nil {
			return session.WithNames(err, lookup.NameOf(ctx, s, conn))
		}
		return s.Done(name, "deleted")
	})
	return c
}

// argCommand returns a command with the single argument VOLUME, a name or an ID, and shell completion for it.
func argCommand(s *session.Session, use, short string) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: session.Exactly("VOLUME")}
	c.ValidArgsFunction = session.FirstArg(Names(s))
	return c
}

// Find returns the ID of the volume with a name or ID. It makes no call for an ID. An operator can name a volume of any
// project by its ID.
func Find(ctx context.Context, s *session.Session, conn *dial.Conn, nameOrID string) (string, error) {
	if session.IsID(nameOrID) {
		s.LookUpByID(func() (org, project string, err error) {
			all, err := listedIn(s, &scope{all: true}).All(ctx, conn)
			v, err := session.WithID("volume", nameOrID, all, err)
			return v.GetOrgId(), v.GetProjectId(), err
		})
		return nameOrID, nil
	}
	if err := cloud.CheckName("volume", nameOrID); err != nil {
		return "", session.Usagef("%q is not a valid name or ID of a volume", nameOrID)
	}
	volumes, err := named(ctx, s, conn, nameOrID)
	if err != nil {
		return "", err
	}
	return one(s, nameOrID, volumes)
}

// named returns the volumes with a name.
func named(ctx context.Context, s *session.Session, conn *dial.Conn, name string) ([]*vmv1.Volume, error) {
	volumes, err := listed(s).All(ctx, conn)
	return slices.DeleteFunc(volumes, func(v *vmv1.Volume) bool { return v.GetName() != name }), err
}

// one returns the ID of the only volume with a name. It returns an error if there is none, or if there are several.
func one(s *session.Session, name string, volumes []*vmv1.Volume) (string, error) {
	var matches []session.Match
	for _, v := range volumes {
		matches = append(matches, session.Match{ID: v.GetId(), About: fmt.Sprintf("%s in %s/%s", status(v), v.GetOrgId(), v.GetProjectId())})
	}
	return session.One("volume", s.Scope(), name, matches)
}

// Names returns a shell completion with the names of volumes.
func Names(s *session.Session) cobra.CompletionFunc { return listed(s).Names(s) }

func status(v *vmv1.Volume) string { return show.Enum("VOLUME_STATUS", v.GetStatus()) }

func size(v *vmv1.Volume) string { return show.Bytes(v.GetSizeGib() << 30) }

func fields(now time.Time, v *vmv1.Volume) [][2]string {
	f := [][2]string{
		{"Name", v.GetName()}, {"ID", v.GetId()}, {"Org", v.GetOrgId()}, {"Project", v.GetProjectId()}, {"Status", status(v)},
		{"Size", size(v)}, {"Class", v.GetStorageClass()}, {"Driver", show.Enum("VOLUME_DRIVER_KIND", v.GetDriver())},
		{"VM", v.GetAttachedToVm()}, {"Host", v.GetAttachedToNode()},
		{"Attachments", fmt.Sprintf("%d, of which %d are flushed", v.GetAttachmentGeneration(), v.GetLastFlushedAttachmentGeneration())},
		{"Created", show.When(v.GetCreatedAt()) + " (" + show.Age(now, v.GetCreatedAt()) + " ago)"},
	}
	for _, pairs := range []struct {
		name string
		of   map[string]string
	}{{"Label", v.GetLabels()}, {"Metadata", v.GetMetadata()}} {
		for _, k := range slices.Sorted(maps.Keys(pairs.of)) {
			f = append(f, [2]string{pairs.name + " " + k, pairs.of[k]})
		}
	}
	return f
}

package volume

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/image"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	"github.com/trivet-cloud/trivet/cli/vm/lookup"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// snapshotTimeout is the deadline of `trivet snapshot create --wait`, unless --timeout is given.
const snapshotTimeout = 12 * time.Hour

// SnapshotCommand returns the command `trivet snapshot`.
func SnapshotCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "snapshot", Short: "Copy volumes as they are at one instant", Args: cobra.NoArgs,
		Long: `A snapshot is a copy of a volume at one instant. A VM can use the volume while the copy is made. A snapshot is
stored in the storage pool of its volume, and counts there with the full size of the volume. To use a snapshot, create a
volume from it: see ` + "`trivet volume create --snapshot`" + `. A volume with snapshots cannot be deleted.`,
		Example: `  trivet snapshot create before-upgrade --volume data
  trivet snapshot create before-upgrade --vm web
  trivet volume create data-2 --snapshot before-upgrade`,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(createSnapshotCommand(s), listSnapshotsCommand(s), showSnapshotCommand(s), deleteSnapshotCommand(s))
	return c
}

func createSnapshotCommand(s *session.Session) *cobra.Command {
	var of, vm string
	var labels []string
	var wait bool
	c := &cobra.Command{
		Use: "create NAME", Short: "Create a snapshot of a volume, or of all volumes of a VM", Args: session.Exactly("NAME"),
		Long: `Create a snapshot of a volume. With --vm, create a snapshot of each volume that is attached to the VM. These
snapshots have the content of the same instant. The name of each of them is NAME, a hyphen and the ID of the VM's disk.
With --wait, the command waits until the copies are complete. Otherwise they go on after it has ended.`,
		Example: `  trivet snapshot create before-upgrade --volume data --wait
  trivet snapshot create before-upgrade --vm web`,
	}
	p := c.Flags()
	p.StringVar(&of, "volume", "", "volume, by name or ID")
	p.StringVar(&vm, "vm", "", "VM, by name or ID")
	p.StringArrayVar(&labels, "label", nil, "KEY=VALUE, repeatable")
	p.BoolVar(&wait, "wait", false, "wait until the snapshots are AVAILABLE")
	session.RequireOne(c, "volume", "vm")
	session.Exclusive(c, "volume", "vm")
	_ = c.RegisterFlagCompletionFunc("volume", Names(s)) // its only error is for an unknown flag
	create := func(ctx context.Context, conn *dial.Conn, args []string) error {
		if err := cloud.CheckName("NAME", args[0]); err != nil {
			return session.Usagef("%v", err)
		}
		pairs, err := session.Pairs("label", labels)
		if err != nil {
			return err
		}
		call := ctx
		if wait {
			var cancel context.CancelFunc
			call, cancel = context.WithTimeout(ctx, callTimeout)
			defer cancel()
		}
		made, err := createSnapshots(call, s, conn, newSnapshot{args[0], of, vm, pairs})
		if err != nil {
			return err
		}
		if wait {
			if err := awaitSnapshots(ctx, s, conn, made); err != nil {
				return err
			}
		}
		if vm != "" {
			return snapshots(s, &of).PrintAll(ctx, s, conn, made...)
		}
		return snapshots(s, &of).PrintOne(ctx, s, conn, made[0])
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		limit := callTimeout
		if wait {
			limit = snapshotTimeout
		}
		return s.Run(limit, create)(c, args)
	}
	return c
}

// newSnapshot describes the snapshots to create: of a volume, or of all volumes of a VM, by name or ID.
type newSnapshot struct {
	name, volume, vm string
	labels           map[string]string
}

// createSnapshots creates snapshots, and does not wait until they are AVAILABLE.
func createSnapshots(ctx context.Context, s *session.Session, conn *dial.Conn, n newSnapshot) ([]*storagev1.Snapshot, error) {
	org, project := s.Tenant()
	client := storagev1.NewSnapshotServiceClient(conn)
	if n.vm != "" {
		id, err := lookup.Find(ctx, s, conn, n.vm)
		if err != nil {
			return nil, err
		}
		out, err := client.CreateVmSnapshots(ctx, &storagev1.CreateVmSnapshotsRequest{
			OrgId: org, ProjectId: project, VmId: id, Name: n.name, Labels: n.labels,
		})
		return out.GetSnapshots(), err
	}
	id, err := Find(ctx, s, conn, n.volume)
	if err != nil {
		return nil, err
	}
	out, err := client.CreateSnapshot(ctx, &storagev1.CreateSnapshotRequest{
		OrgId: org, ProjectId: project, VolumeId: id, Name: n.name, Labels: n.labels,
	})
	return []*storagev1.Snapshot{out}, err
}

// awaitSnapshots waits until the snapshots are AVAILABLE, and replaces each in all by its last state. It returns an error
// with the reason if one becomes ERROR.
func awaitSnapshots(ctx context.Context, s *session.Session, conn *dial.Conn, all []*storagev1.Snapshot) error {
	goesOn := session.Ongoing{What: "the hosts continue to copy", Look: "trivet snapshot list"}
	return s.WaitOngoing("waiting for the snapshots", goesOn, func(func(string)) error {
		for i, one := range all {
			for one.GetStatus() == storagev1.SnapshotStatus_SNAPSHOT_STATUS_PENDING {
				if err := dial.Sleep(ctx, snapshotPoll); err != nil {
					return fmt.Errorf("snapshot %s is not complete yet: %w", one.GetName(), err)
				}
				var err error
				if one, err = readSnapshot(ctx, conn, one.GetOrgId(), one.GetProjectId(), one.GetId()); err != nil {
					return err
				}
			}
			if one.GetStatus() != storagev1.SnapshotStatus_SNAPSHOT_STATUS_AVAILABLE {
				return fmt.Errorf("snapshot %s is %s: %s", one.GetName(), snapshotStatus(one), one.GetStatusReason())
			}
			all[i] = one
		}
		return nil
	})
}

// readSnapshot reads a snapshot, and tries again while the control plane cannot be reached.
func readSnapshot(ctx context.Context, conn *dial.Conn, org, project, id string) (one *storagev1.Snapshot, err error) {
	err = image.Persist(ctx, conn, func(ctx context.Context) (err error) {
		one, err = storagev1.NewSnapshotServiceClient(conn).GetSnapshot(ctx, &storagev1.GetSnapshotRequest{OrgId: org, ProjectId: project, SnapshotId: id})
		return err
	})
	return one, err
}

func listSnapshotsCommand(s *session.Session) *cobra.Command {
	var of string
	var all bool
	c := snapshotsIn(s, &of, &all).Command(s, &cobra.Command{Use: "list", Short: "List the project's snapshots"}, callTimeout)
	c.Flags().StringVar(&of, "volume", "", "list only the snapshots of this volume, by name or ID")
	_ = c.RegisterFlagCompletionFunc("volume", Names(s)) // its only error is for an unknown flag
	session.AllProjectsFlag(c, &all)
	session.Exclusive(c, "volume", "all-projects")
	return c
}

// snapshots describes the snapshots of a project for lists. If volume is not empty, it is the name or ID of a volume, and
// only its snapshots are listed.
func snapshots(s *session.Session, volume *string) *list.Kind[*storagev1.Snapshot] {
	return snapshotsIn(s, volume, new(bool))
}

// snapshotsIn is like snapshots. If all is true, it describes the snapshots of all projects.
func snapshotsIn(s *session.Session, volume *string, all *bool) *list.Kind[*storagev1.Snapshot] {
	return &list.Kind[*storagev1.Snapshot]{
		Page: func(ctx context.Context, conn *dial.Conn, q list.Query) (_ []*storagev1.Snapshot, _ string, err error) {
			if *all {
				req := &storagev1.ListAllSnapshotsRequest{PageSize: q.Size, PageToken: q.Token}
				req.OrgId, req.ProjectId = s.Within()
				page, err := storagev1.NewSnapshotServiceClient(conn).ListAllSnapshots(ctx, req)
				return page.GetSnapshots(), page.GetNextPageToken(), err
			}
			req := &storagev1.ListSnapshotsRequest{PageSize: q.Size, PageToken: q.Token}
			req.OrgId, req.ProjectId = s.Tenant()
			if *volume != "" {
				if *volume, err = Find(ctx, s, conn, *volume); err != nil { // the ID is used for the next page too
					return nil, "", err
				}
				req.VolumeId = *volume
			}
			page, err := storagev1.NewSnapshotServiceClient(conn).ListSnapshots(ctx, req)
			return page.GetSnapshots(), page.GetNextPageToken(), err
		},
		Name: (*storagev1.Snapshot).GetName,
		Columns: func(ctx context.Context, s *session.Session, conn *dial.Conn) []list.Column[*storagev1.Snapshot] {
			type snapshot = *storagev1.Snapshot
			volumes := NameOf(ctx, s, conn)
			return []list.Column[snapshot]{
				list.Tenant[snapshot](*all),
				{Name: "NAME", Text: snapshot.GetName},
				{Name: "ID", Text: snapshot.GetId, In: list.InWide},
				{Name: "STATUS", Text: snapshotStatus},
				list.Size("SIZE", func(o snapshot) uint64 { return o.GetSizeGib() << 30 }),
				{Name: "VOLUME", Text: func(o snapshot) string { return volumes(o.GetVolumeId()) }, Max: 20},
				{Name: "VOLUME ID", Text: snapshot.GetVolumeId, In: list.InWide},
				list.Age("AGE", s.Now, snapshot.GetCreatedAt),
				list.Time("CREATED", snapshot.GetCreatedAt, list.InWide),
				list.Time("TAKEN", snapshot.GetTakenAt, list.InWide),
			}
		},
	}
}

func showSnapshotCommand(s *session.Session) *cobra.Command {
	c := snapshotArgCommand(s, "show SNAPSHOT", "Show a snapshot")
	session.Many(c)
	c.RunE = s.ShowEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		id, err := image.FindSnapshot(ctx, s, conn, name)
		if err != nil {
			return err
		}
		org, project := s.Tenant()
		one, err := storagev1.NewSnapshotServiceClient(conn).GetSnapshot(ctx, &storagev1.GetSnapshotRequest{
			OrgId: org, ProjectId: project, SnapshotId: id,
		})
		if err != nil {
			return err
		}
		return s.Print(one, []string{one.GetName()}, func(w io.Writer) error { return show.Fields(w, snapshotFields(s.Now(), one)) })
	})
	return c
}

func deleteSnapshotCommand(s *session.Session) *cobra.Command {
	c := snapshotArgCommand(s, "delete SNAPSHOT", "Delete a snapshot")
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		id, err := image.FindSnapshot(ctx, s, conn, name)
		if err != nil {
			return err
		}
		org, project := s.Tenant()
		if _, err := storagev1.NewSnapshotServiceClient(conn).DeleteSnapshot(ctx, &storagev1.DeleteSnapshotRequest{
			OrgId: org, ProjectId: project, SnapshotId: id,
		}); err != nil {
			return err
		}
		return s.Done(name, "deleted")
	})
	return c
}

// snapshotArgCommand returns a command with the single argument SNAPSHOT, a name or an ID, and shell completion for it.
func snapshotArgCommand(s *session.Session, use, short string) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: session.Exactly("SNAPSHOT")}
	c.ValidArgsFunction = session.FirstArg(snapshotNames(s))
	return c
}

func snapshotNames(s *session.Session) cobra.CompletionFunc {
	return snapshots(s, new(string)).Names(s)
}

func snapshotStatus(one *storagev1.Snapshot) string {
	return show.Enum("SNAPSHOT_STATUS", one.GetStatus())
}

func snapshotFields(now time.Time, one *storagev1.Snapshot) [][2]string {
	f := [][2]string{
		{"Name", one.GetName()}, {"ID", one.GetId()}, {"Org", one.GetOrgId()}, {"Project", one.GetProjectId()}, {"Status", snapshotStatus(one)},
		{"Reason", one.GetStatusReason()}, {"Volume", one.GetVolumeId()}, {"Group", one.GetGroupId()}, {"Size", show.Bytes(one.GetSizeGib() << 30)},
	}
	if one.GetTakenAt() > 0 {
		f = append(f, [][2]string{
			{"Stored", show.Bytes(one.GetStoredBytes())}, {"Consistency", show.Enum("SNAPSHOT_CONSISTENCY", one.GetConsistency())},
			{"Taken", show.When(one.GetTakenAt())},
		}...)
	}
	f = append(f, [2]string{"Created", show.When(one.GetCreatedAt()) + " (" + show.Age(now, one.GetCreatedAt()) + " ago)"})
	if one.GetScheduled() {
		f = append(f, [2]string{"Scheduled", "yes"})
	}
	return f
}

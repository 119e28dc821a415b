package volume

import (
	"context"
	"errors"
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
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
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
	c.AddCommand(createSnapshotCommand(s), listSnapshotsCommand(s), showSnapshotCommand(s), updateSnapshotCommand(s), deleteSnapshotCommand(s))
	return c
}

func createSnapshotCommand(s *session.Session) *cobra.Command {
	var of, vm string
	var labels []string
	var wait session.Waiting
	c := &cobra.Command{
		Use: "create NAME", Short: "Create a snapshot of a volume, or of all volumes of a VM", Args: session.Exactly("NAME"),
		Long: `Create a snapshot of a volume. With --vm, create a snapshot of each volume that is attached to the VM. These
snapshots have the content of the same instant. The name of each of them is NAME, a hyphen and the ID of the VM's disk.
Disks that are not volumes are not copied: see "class" in ` + "`trivet vm create --help`" + ` for disks that are volumes.
With --wait, the command returns when the copies are complete. If the copy of one volume fails, it still waits for the
others, prints those that are complete, and fails. Without --wait, the copies go on after it has ended.`,
		Example: `  trivet snapshot create before-upgrade --volume data --wait
  trivet snapshot create before-upgrade --vm web`,
	}
	p := c.Flags()
	p.StringVar(&of, "volume", "", "volume, by name or ID")
	p.StringVar(&vm, "vm", "", "VM, by name or ID")
	p.StringArrayVar(&labels, "label", nil, "KEY=VALUE, repeatable")
	wait.Add(c, false)
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
		if wait.On() {
			var cancel context.CancelFunc
			call, cancel = context.WithTimeout(ctx, callTimeout)
			defer cancel()
		}
		made, err := createSnapshots(call, s, conn, newSnapshot{args[0], of, vm, pairs})
		if err != nil {
			return err
		}
		var failed []error
		if wait.On() {
			made, failed = awaitSnapshots(ctx, s, conn, made)
		}
		if len(made) > 0 {
			ctx, cancel := s.PrintContext(ctx)
			defer cancel()
			if vm != "" {
				err = snapshots(s, &of).PrintAll(ctx, s, conn, made...)
			} else {
				err = snapshots(s, &of).PrintOne(ctx, s, conn, made[0])
			}
		}
		return errors.Join(err, s.ReportAll(failed...))
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		limit := callTimeout
		if wait.On() {
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
		if err == nil {
			noteDisksWithoutSnapshot(ctx, s, conn, n.vm, id)
		}
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

// noteDisksWithoutSnapshot tells the user which disks of a VM the snapshots of the VM do not contain, because they are
// not volumes. It prints nothing if the VM cannot be read, because the snapshots were created.
func noteDisksWithoutSnapshot(ctx context.Context, s *session.Session, conn *dial.Conn, name, id string) {
	org, project := s.Tenant()
	vm, err := vmv1.NewVmServiceClient(conn).GetVm(ctx, &vmv1.GetVmRequest{OrgId: org, ProjectId: project, VmId: id})
	if err != nil {
		return
	}
	for _, d := range vm.GetSpec().GetDisks() {
		if d.GetSource().GetVolumeId() == "" {
			s.Note("the disk %s of %s is not a volume, and has no snapshot", d.GetId(), name)
		}
	}
}

// awaitSnapshots waits until no snapshot is PENDING any more. It returns those that are AVAILABLE, in their last state,
// and an error for each other one: for a snapshot in ERROR, with the reason, and for one that is PENDING when the deadline
// of ctx passes. If the user interrupts, it returns only that error.
func awaitSnapshots(ctx context.Context, s *session.Session, conn *dial.Conn, all []*storagev1.Snapshot) (complete []*storagev1.Snapshot, failed []error) {
	goesOn := session.Ongoing{What: "the hosts continue to copy", Look: "trivet snapshot list"}
	// The error of WaitOngoing is one of those that are returned. It keeps goesOn for their reports.
	err := s.WaitOngoing("waiting for the snapshots", goesOn, func(say func(string)) error {
		errs := make([]error, len(all))
		done := 0
		for i := range all {
			if all[i], errs[i] = awaitSnapshot(ctx, conn, all[i]); errs[i] == nil {
				done++
			}
			say(fmt.Sprintf("waiting for the snapshots: %d of %d are complete", done, len(all)))
		}
		readLate(ctx, s, conn, all, errs)
		for i, err := range errs {
			if err != nil {
				failed = append(failed, err)
			} else {
				complete = append(complete, all[i])
			}
		}
		return errors.Join(failed...)
	})
	if err != nil && errors.Is(ctx.Err(), context.Canceled) {
		return nil, []error{ctx.Err()}
	}
	return complete, failed
}

// readLate reads the snapshots with an error again, if the deadline of ctx has passed: while awaitSnapshots waited for one,
// others may have become AVAILABLE or ERROR. It changes all and errs.
func readLate(ctx context.Context, s *session.Session, conn *dial.Conn, all []*storagev1.Snapshot, errs []error) {
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return
	}
	ctx, cancel := s.PrintContext(ctx)
	defer cancel()
	for i, one := range all {
		if errs[i] == nil || one.GetStatus() != storagev1.SnapshotStatus_SNAPSHOT_STATUS_PENDING {
			continue
		}
		now, err := readSnapshot(ctx, conn, one.GetOrgId(), one.GetProjectId(), one.GetId())
		if err == nil && now.GetStatus() != storagev1.SnapshotStatus_SNAPSHOT_STATUS_PENDING {
			all[i], errs[i] = now, checkAvailable(now)
		}
	}
}

// awaitSnapshot waits until a snapshot is not PENDING any more, and returns its last state. It returns an error if the
// snapshot is not AVAILABLE.
func awaitSnapshot(ctx context.Context, conn *dial.Conn, one *storagev1.Snapshot) (*storagev1.Snapshot, error) {
	for one.GetStatus() == storagev1.SnapshotStatus_SNAPSHOT_STATUS_PENDING {
		if err := dial.Sleep(ctx, snapshotPoll); err != nil {
			return one, fmt.Errorf("snapshot %s is not complete yet: %w", one.GetName(), err)
		}
		now, err := readSnapshot(ctx, conn, one.GetOrgId(), one.GetProjectId(), one.GetId())
		if err != nil {
			return one, fmt.Errorf("snapshot %s is not complete yet: %w", one.GetName(), err)
		}
		one = now
	}
	return one, checkAvailable(one)
}

// checkAvailable returns an error with the reason unless the snapshot is AVAILABLE.
func checkAvailable(one *storagev1.Snapshot) error {
	if one.GetStatus() == storagev1.SnapshotStatus_SNAPSHOT_STATUS_AVAILABLE {
		return nil
	}
	return fmt.Errorf("snapshot %s is %s: %s", one.GetName(), snapshotStatus(one), one.GetStatusReason())
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
			volumes := nameIn(ctx, s, conn, *all)
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

func updateSnapshotCommand(s *session.Session) *cobra.Command {
	var name string
	var labels []string
	c := snapshotArgCommand(s, "update SNAPSHOT", "Change the name and the labels of a snapshot")
	c.Long = `Change the name and the labels of a snapshot. Labels that are not given stay. An empty value removes a label. The
schedule of a volume deletes the snapshots that it has created, even if they were renamed.`
	c.Example = "  trivet snapshot update before-upgrade --name release-1 --label keep=yes --label old="
	c.Flags().StringVar(&name, "name", "", "new name")
	c.Flags().StringArrayVar(&labels, "label", nil, "KEY=VALUE, or KEY= to remove the label, repeatable")
	session.RequireOne(c, "name", "label")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) (err error) {
		req := &storagev1.UpdateSnapshotRequest{Name: name}
		if c.Flags().Changed("name") {
			if err := cloud.CheckName("--name", name); err != nil {
				return session.Usagef("%v", err)
			}
		}
		if req.Labels, err = session.Pairs("label", labels); err != nil {
			return err
		}
		if req.SnapshotId, err = image.FindSnapshot(ctx, s, conn, args[0]); err != nil {
			return err
		}
		req.OrgId, req.ProjectId = s.Tenant()
		one, err := storagev1.NewSnapshotServiceClient(conn).UpdateSnapshot(ctx, req)
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
		{"Reason", one.GetStatusReason()}, {"Volume", one.GetVolumeId()}, {"Group", one.GetGroupId()},
		{"Labels", show.Pairs(one.GetLabels())}, {"Size", show.Bytes(one.GetSizeGib() << 30)},
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

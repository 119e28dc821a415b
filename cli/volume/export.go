package volume

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/image"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	"github.com/trivet-cloud/trivet/shared/rbddiff"
)

const (
	// snapshotPoll is the pause between two calls that wait for a snapshot.
	snapshotPoll = 200 * time.Millisecond
	// checkpointBytes is the number of bytes of the volume after which the progress of an export is saved.
	checkpointBytes = 256 << 20
)

func exportCommand(s *session.Session) *cobra.Command {
	var snapshot, since, format string
	c := &cobra.Command{
		Use: "export VOLUME FILE", Short: "Write the content of a volume to a file", Args: session.Exactly("VOLUME", "FILE"),
		Long: `Write the content of a snapshot of a volume to a file on this host. Without --snapshot, the command creates a snapshot
and deletes it at the end. With --since, it writes only the differences from an older snapshot of the volume.
Until the export is complete, the file is called FILE.part. If the export is interrupted, the same command continues it.

A file of the format raw has the bytes of the disk, and parts that are zero are holes. A file of the format diff has
the format "rbd diff v1" of Ceph; ` + "`trivet volume import`" + ` and the programs of Ceph read it. Other formats, such as qcow2, are not
written: ` + "`qemu-img convert`" + ` makes them from a raw file.`,
		Example: `  trivet volume export data monday.diff --snapshot monday --format diff
  trivet volume export data tuesday.diff --snapshot tuesday --since monday
  trivet volume import copy monday.diff tuesday.diff`,
	}
	p := c.Flags()
	p.StringVar(&snapshot, "snapshot", "", "snapshot of the volume, by name or ID (default: a new one)")
	p.StringVar(&since, "since", "", "older snapshot of the volume, by name or ID: write only the differences from it")
	p.StringVar(&format, "format", "", "raw or diff (default: raw; with --since: diff)")
	_ = c.RegisterFlagCompletionFunc("snapshot", snapshotNames(s)) // its only error is for an unknown flag
	_ = c.RegisterFlagCompletionFunc("since", snapshotNames(s))    // its only error is for an unknown flag
	c.ValidArgsFunction = session.FirstArg(Names(s))
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) (err error) {
		e := &export{s: s, conn: conn, client: storagev1.NewSnapshotServiceClient(conn), path: args[1], name: args[0]}
		switch {
		case format == "" && since != "":
			e.state.Format = formatDiff
		case format == "":
			e.state.Format = formatRaw
		case format != formatRaw && format != formatDiff:
			return session.Usagef("--format %q: want raw or diff", format)
		case format == formatRaw && since != "":
			return session.Usagef("--since needs --format diff")
		default:
			e.state.Format = format
		}
		if suffix := strings.ToLower(filepath.Ext(e.path)); slices.Contains(otherFormats, suffix) && format == "" {
			return session.Usagef("FILE %s: the export has the format %s, not %s: give a name with another ending, or --format", e.path,
				e.state.Format, strings.TrimPrefix(suffix, "."))
		}
		if _, err := os.Lstat(e.path); err == nil {
			return session.Errorf(codes.AlreadyExists, "give another name, or remove it", "%s exists", e.path)
		}
		if e.state.Volume, err = Find(ctx, s, conn, args[0]); err != nil {
			return err
		}
		if snapshot != "" {
			if e.state.Snapshot, err = image.FindSnapshot(ctx, s, conn, snapshot); err != nil {
				return err
			}
		}
		if since != "" {
			if e.state.Since, err = image.FindSnapshot(ctx, s, conn, since); err != nil {
				return err
			}
		}
		if err := e.run(ctx); err != nil {
			return err
		}
		return s.Done(e.path, "exported")
	})
	return c
}

const (
	formatRaw  = "raw"
	formatDiff = "diff"
)

// otherFormats lists the endings of the names of files with formats of disks that the command cannot write.
var otherFormats = []string{".qcow2", ".qcow", ".vmdk", ".vdi", ".vhd", ".vhdx"}

// export is one run of the command that exports a volume.
type export struct {
	s      *session.Session
	conn   *dial.Conn
	client storagev1.SnapshotServiceClient
	path   string
	name   string // of the volume, as the user gave it
	state  savedExport
	file   *os.File
}

// run exports the snapshot to the file.
func (e *export) run(ctx context.Context) (err error) {
	if err := e.resume(); err != nil {
		return err
	}
	size, err := e.waitForSnapshot(ctx)
	if err != nil {
		return err
	}
	if err := e.open(); err != nil {
		return err
	}
	defer e.file.Close()
	if err := e.save(); err != nil {
		return err
	}
	err = e.s.Wait("exporting "+e.name, func(say func(string)) error { return e.fill(ctx, size, say) })
	if e.state.Offset == 0 && grpcstatus.Code(err) == codes.FailedPrecondition {
		// The snapshot cannot be exported, for example because it is encrypted. Another attempt would fail too.
		return errors.Join(err, os.Remove(e.file.Name()), e.end(ctx))
	}
	if err != nil {
		e.s.Note("the export of %s is not complete: run the same command again to continue it", e.name)
		return errors.Join(err, e.checkpoint())
	}
	if err := e.publish(); err != nil {
		return err
	}
	err = e.end(ctx)
	if err != nil {
		e.s.Note("the file is complete, but its snapshot is left over: `trivet snapshot delete %s` removes it", e.state.Snapshot)
	}
	return err
}

// end removes the saved state of the export, and deletes the snapshot if the command has created it.
func (e *export) end(ctx context.Context) error {
	e.forget()
	if !e.state.Temporary {
		return nil
	}
	org, project := e.s.Tenant()
	_, err := e.client.DeleteSnapshot(ctx, &storagev1.DeleteSnapshotRequest{OrgId: org, ProjectId: project, SnapshotId: e.state.Snapshot})
	return err
}

// waitForSnapshot creates a snapshot if the user named none, and waits until the snapshot is AVAILABLE. It returns the
// size in bytes.
func (e *export) waitForSnapshot(ctx context.Context) (size uint64, err error) {
	org, project := e.s.Tenant()
	if e.state.Snapshot == "" {
		made, err := e.client.CreateSnapshot(ctx, &storagev1.CreateSnapshotRequest{
			OrgId: org, ProjectId: project, VolumeId: e.state.Volume, Name: "export-" + e.s.Now().UTC().Format("20060102-150405"),
		})
		if err != nil {
			return 0, err
		}
		e.state.Snapshot, e.state.Temporary = made.GetId(), true
		if err := e.save(); err != nil {
			return 0, err
		}
	}
	lost := false // whether the snapshot was deleted or will never be AVAILABLE
	err = e.s.Wait("waiting for the snapshot of "+e.name, func(func(string)) error {
		for {
			one, err := readSnapshot(ctx, e.conn, org, project, e.state.Snapshot)
			switch {
			case grpcstatus.Code(err) == codes.NotFound:
				lost = true
				return err
			case err != nil:
				return err
			case one.GetVolumeId() != e.state.Volume:
				return fmt.Errorf("snapshot %s is not a snapshot of volume %s", one.GetName(), e.name)
			case one.GetStatus() == storagev1.SnapshotStatus_SNAPSHOT_STATUS_AVAILABLE:
				size = one.GetSizeGib() << 30
				return nil
			case one.GetStatus() != storagev1.SnapshotStatus_SNAPSHOT_STATUS_PENDING:
				lost = true
				return fmt.Errorf("snapshot %s is %s: %s", one.GetName(), snapshotStatus(one), one.GetStatusReason())
			}
			if err := dial.Sleep(ctx, snapshotPoll); err != nil {
				return err
			}
		}
	})
	if lost && e.state.Temporary {
		e.abandon(ctx)
	}
	return size, err
}

// abandon deletes the snapshot that the command created, the incomplete file and the saved progress, so that the same
// command begins a new export.
func (e *export) abandon(ctx context.Context) {
	org, project := e.s.Tenant()
	_, err := e.client.DeleteSnapshot(ctx, &storagev1.DeleteSnapshotRequest{OrgId: org, ProjectId: project, SnapshotId: e.state.Snapshot})
	if err != nil && grpcstatus.Code(err) != codes.NotFound {
		e.s.Note("the snapshot of the export is left over: `trivet snapshot delete %s` removes it", e.state.Snapshot)
	}
	_ = os.Remove(e.path + ".part")
	e.forget()
	e.s.Note("the snapshot of the export cannot be read: run the same command again to export a new snapshot")
}

// fill writes the ranges that the file does not have yet. If the connection breaks, it continues at the end of the last
// range.
func (e *export) fill(ctx context.Context, size uint64, say func(string)) error {
	org, project := e.s.Tenant()
	say(fmt.Sprintf("exporting %s: %s", e.name, show.Bar(int64(e.state.Offset), int64(size))))
	for {
		before := e.state.Offset
		err := image.Persist(ctx, e.conn, func(ctx context.Context) error {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			stream, err := e.client.ExportSnapshot(ctx, &storagev1.ExportSnapshotRequest{
				OrgId: org, ProjectId: project, SnapshotId: e.state.Snapshot, SinceSnapshotId: e.state.Since, Offset: e.state.Offset,
			})
			if err != nil {
				return err
			}
			in := &receiver{receive: stream.Recv}
			content, err := rbddiff.NewReader(in)
			if err == nil {
				err = e.write(content, func() { say(fmt.Sprintf("exporting %s: %s", e.name, show.Bar(int64(e.state.Offset), int64(size)))) })
			}
			if in.err != nil {
				return in.err // the error of the call says more than that of the reader
			}
			return err
		})
		if err == nil || e.state.Offset == before || !image.IsOutage(err) {
			return err
		}
	}
}

// write writes the ranges of a stream to the file, and the end of the content.
func (e *export) write(content *rbddiff.Reader, progress func()) error {
	out, err := e.begin(content.Header())
	if err != nil {
		return err
	}
	saved := e.state.Offset
	for {
		r, err := content.Next()
		if err == io.EOF {
			return out.end()
		}
		if err != nil {
			return err
		}
		if err := out.write(r); err != nil {
			return fmt.Errorf("write the file: %w", err)
		}
		e.state.Offset = r.Offset + r.Length
		progress()
		if e.state.Offset-saved >= checkpointBytes {
			saved = e.state.Offset
			if err := e.checkpoint(); err != nil {
				return err
			}
		}
	}
}

// receiver is an io.Reader of the data of a stream. It keeps the error of the stream.
type receiver struct {
	receive func() (*storagev1.ExportSnapshotResponse, error)
	rest    []byte
	err     error // other than io.EOF
}

func (r *receiver) Read(b []byte) (int, error) {
	for len(r.rest) == 0 {
		piece, err := r.receive()
		if err != nil {
			if err != io.EOF {
				r.err = err
			}
			return 0, err
		}
		r.rest = piece.GetData()
	}
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

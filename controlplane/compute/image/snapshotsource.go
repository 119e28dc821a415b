package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/rbddiff"
)

// Snapshots reads snapshots of volumes, from which images can be made. The source URL of such an image is
// "snapshot:<id of the snapshot>".
type Snapshots interface {
	// Check returns an error if the tenant has no such snapshot or the snapshot cannot be read.
	Check(context.Context, cloud.Tenant, cloud.SnapshotID) error
	// Export calls send with the parts of the content, in the format of package rbddiff. The parameter since is empty.
	Export(ctx context.Context, t cloud.Tenant, id, since cloud.SnapshotID, offset uint64, send func([]byte) error) error
}

const snapshotScheme = "snapshot:"

// isSnapshot reports whether an image is made from a snapshot of a volume.
func isSnapshot(i *cloud.Image) bool { return strings.HasPrefix(i.Source, snapshotScheme) }

func snapshotOf(i *cloud.Image) cloud.SnapshotID {
	return cloud.SnapshotID(strings.TrimPrefix(i.Source, snapshotScheme))
}

// checkSnapshot returns an error if the image cannot be made from the snapshot in its source URL. The snapshot must be
// in the project of the caller.
func (s *Service) checkSnapshot(ctx context.Context, i *cloud.Image) error {
	if err := cloud.CheckUUID("source_url", string(snapshotOf(i))); err != nil {
		return err
	}
	if i.Format != cloud.FormatUnspecified && i.Format != cloud.FormatQCOW2 {
		return fault.Invalid("format", "an image that is made from a snapshot is QCOW2")
	}
	if i.Metadata[cloud.SourceSHA256] != "" || i.Metadata[cloud.SourceSHA512] != "" {
		return fault.Invalid("metadata", "an image that is made from a snapshot has no checksum of its source")
	}
	t := cloud.Tenant{Org: i.Org, Project: auth.CallerOf(ctx).ProjectIn(i.Org)}
	if t.Project == "" {
		return fault.New(fault.PermissionDenied, "name the project of the snapshot with the metadata trivet-project, or request a token for the project").
			WithReason(auth.TenantRequired)
	}
	return s.opts.Snapshots.Check(ctx, t, snapshotOf(i))
}

// importSnapshot imports an image from a snapshot, and stores the result in the image's record. After a temporary
// error, the image stays PENDING, and the next Run starts the import again. Examples are a host that is not connected,
// and the limit of concurrent reads of snapshots from one host.
func (s *Service) importSnapshot(ctx context.Context, i cloud.Image) error {
	limited, cancel := context.WithTimeout(ctx, importTime)
	defer cancel()
	done, err := s.copySnapshot(limited, &i)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if f, ok := fault.From(err); ok && (f.Retry || f.Kind == fault.Unavailable) {
		return fmt.Errorf("read the snapshot of image %s: %w", i.ID, err)
	}
	if f, ok := fault.From(err); ok {
		err = &userError{"the snapshot cannot be read: " + f.Message}
	}
	if err != nil {
		return s.recordFailure(ctx, i.ID, err)
	}
	done.ID = i.ID
	return s.record(ctx, done)
}

// copySnapshot writes the content of the image's snapshot to a QCOW2 file in s.opts.Files.
func (s *Service) copySnapshot(ctx context.Context, i *cloud.Image) (done importResult, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, w := io.Pipe()
	defer r.Close()
	go func() {
		w.CloseWithError(s.opts.Snapshots.Export(ctx, cloud.Tenant{Org: i.Org, Project: i.Project}, snapshotOf(i), "", 0, func(b []byte) error {
			_, err := w.Write(b)
			return err
		}))
	}()
	content, err := rbddiff.NewReader(r)
	if err != nil {
		return done, err
	}
	size := content.Header().Size
	if size == 0 || size > maxBytes {
		return done, &userError{fmt.Sprintf("the snapshot has %d bytes; an image has at most %d", size, int64(maxBytes))}
	}
	p, err := s.opts.Files.begin(reserveStep)
	if errors.Is(err, errNoSpace) {
		return done, s.errNoRoom()
	}
	if err != nil {
		return done, err
	}
	defer p.discard()
	err = p.fill(ctx, &reservingWriter{part: p, reserved: reserveStep}, size, func(write func(uint64, []byte) error) error {
		for {
			one, err := content.Next()
			if errors.Is(err, io.EOF) && !errors.Is(err, rbddiff.ErrFormat) {
				return nil
			}
			if err != nil {
				return err
			}
			if one.Data == nil {
				continue // A QCOW2 file has zeros where nothing was written.
			}
			if err := write(one.Offset, one.Data); err != nil {
				return err
			}
		}
	})
	if errors.Is(err, errNoSpace) {
		return done, s.errNoRoom()
	}
	if err != nil {
		return done, err
	}
	if done.Format, done.Virtual, err = examine(contextReaderAt{ctx, p.file}, p.size, cloud.FormatQCOW2); err != nil {
		return done, err
	}
	done.SHA256, done.Size = p.checksum(), uint64(p.size)
	return done, p.commit()
}

func (s *Service) errNoRoom() error {
	return &userError{fmt.Sprintf("member %d does not have enough disk space for the image", s.opts.Self)}
}

// reserveStep is the number of bytes of disk space that a reservingWriter reserves at a time.
const reserveStep = 256 << 20

// reservingWriter writes to the file of a part whose length is not known in advance. It reserves disk space before it
// writes, so that the data never uses the reserveBytes that stay free for the raft log and the records.
type reservingWriter struct {
	part     *part
	reserved int64
}

func (w *reservingWriter) WriteAt(b []byte, at int64) (int, error) {
	for end := at + int64(len(b)); end > w.reserved; w.reserved += reserveStep {
		if err := w.part.reserve(w.reserved, reserveStep); err != nil {
			return 0, err
		}
	}
	return w.part.file.WriteAt(b, at)
}

package volume

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/image"
	"github.com/trivet-cloud/trivet/cli/session"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/qcow2"
	"github.com/trivet-cloud/trivet/shared/rbddiff"
)

func importCommand(s *session.Session) *cobra.Command {
	var class, size string
	c := &cobra.Command{
		Use: "import NAME FILE [DIFF...]", Short: "Create a volume from exported files",
		Args: session.AtLeast("NAME", "FILE"),
		Long: `Create a volume with the content of a file on this host: a file that ` + "`trivet volume export`" + ` wrote, or another raw
or QCOW2 image of a disk. Each DIFF has the changes since the file before it. The command uploads the content as a
private image called NAME, and creates the volume from it. If the upload is interrupted, the same command continues it.

The volume is made independent of the image as soon as its host has made it. For the driver MANAGED, this is when the
volume is attached for the first time. The image can be deleted afterwards.`,
		Example: `  trivet volume import copy monday.diff tuesday.diff
  trivet volume import copy disk.raw --class fast`,
	}
	c.Flags().StringVar(&class, "class", "", "storage class (default: the default class)")
	c.Flags().StringVar(&size, "size", "", "size in GiB, or with a unit: 2TiB (default: the size of the content)")
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) (err error) {
		req := &vmv1.CreateVolumeRequest{Name: args[0], StorageClass: class}
		req.OrgId, req.ProjectId = s.Tenant()
		if err := cloud.CheckName("NAME", args[0]); err != nil {
			return session.Usagef("%v", err)
		}
		if size != "" {
			if req.SizeGib, err = ParseSize(size); err != nil {
				return err
			}
		}
		content, err := packed(ctx, s, args[0], args[1], args[2:])
		if err != nil {
			return err
		}
		defer content.close()
		uploaded, err := image.Upload(ctx, s, conn, args[0], content.path)
		if err != nil {
			if content.temporary != nil {
				s.Note("the content is kept in %s: remove this file if you do not continue the import", content.path)
			}
			return err
		}
		content.remove()
		if req.SizeGib == 0 {
			req.SizeGib = (content.size + 1<<30 - 1) >> 30
		}
		req.ImageId = uploaded.GetId()
		v, err := createFromImage(ctx, s, conn, req)
		if err != nil {
			s.Note("the content is uploaded: `trivet volume create %s --image %s` creates the volume; `trivet image delete %s` removes the image",
				args[0], uploaded.GetId(), uploaded.GetId())
			return err
		}
		return listed(s).PrintOne(ctx, s, conn, v)
	})
	return c
}

// createFromImage creates a volume from an image, and requests that the volume becomes independent of the image. It
// deletes the image if that is possible at once. An error means that the volume was not created.
func createFromImage(ctx context.Context, s *session.Session, conn *dial.Conn, req *vmv1.CreateVolumeRequest) (*vmv1.Volume, error) {
	v, err := vmv1.NewVolumeServiceClient(conn).CreateVolume(ctx, req)
	if err != nil {
		return nil, err
	}
	_, err = storagev1.NewVolumeServiceClient(conn).FlattenVolume(ctx, &storagev1.FlattenVolumeRequest{
		OrgId: req.GetOrgId(), ProjectId: req.GetProjectId(), VolumeId: v.GetId(),
	})
	if err == nil {
		_, err = vmv1.NewImageServiceClient(conn).DeleteImage(ctx, &vmv1.DeleteImageRequest{OrgId: req.GetOrgId(), ImageId: req.GetImageId()})
	}
	if code := grpcstatus.Code(err); err != nil && code != codes.FailedPrecondition && code != codes.Unimplemented {
		s.Note("the volume was created, but its image could not be removed: %v", grpcstatus.Convert(err).Message())
	}
	if err != nil {
		s.Note("the volume still needs its image: after `trivet volume flatten %s` is complete, `trivet image delete %s` removes the image",
			v.GetName(), req.GetImageId())
	}
	return v, nil
}

// packedFile is a file whose content can be uploaded as an image.
type packedFile struct {
	path string
	size uint64 // of the disk in bytes
	// temporary is the open and locked file if path names a temporary file, and otherwise nil.
	temporary *os.File
}

// createPacked creates the temporary file for the import of sources as the volume NAME, or opens the file of an earlier
// run, and locks the file. Each import has a file of its own beside the first source, so imports of the same source can
// run at the same time.
func createPacked(name string, sources []string) (p packedFile, err error) {
	var key strings.Builder
	for _, one := range append([]string{name}, sources...) {
		absolute, err := filepath.Abs(one)
		if err != nil {
			return p, fmt.Errorf("make %s absolute: %w", one, err)
		}
		fmt.Fprintf(&key, "%s\x00", absolute)
	}
	sum := sha256.Sum256([]byte(key.String()))
	p.path = filepath.Join(filepath.Dir(sources[0]), ".trivet-import-"+hex.EncodeToString(sum[:8])+".qcow2")
	if p.temporary, err = os.OpenFile(p.path, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return p, fmt.Errorf("make a temporary file: %w", err)
	}
	err = unix.Flock(int(p.temporary.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("another process is importing %s as %s", sources[0], name)
	} else if err == nil {
		err = p.temporary.Truncate(0)
	}
	if err != nil {
		p.close()
	}
	return p, err
}

// close closes the file and unlocks it.
func (p packedFile) close() {
	if p.temporary != nil {
		_ = p.temporary.Close()
	}
}

// remove removes a temporary file. It must be called only when the file is no longer needed to continue an upload.
func (p packedFile) remove() {
	if p.temporary != nil {
		_ = os.Remove(p.path)
	}
}

// packed returns a file with the content of a full file and its diffs: the full file itself if it is a QCOW2 image, and
// otherwise a temporary QCOW2 file beside it. The parameter name is the name of the new volume.
func packed(ctx context.Context, s *session.Session, name, full string, diffs []string) (out packedFile, err error) {
	in, err := os.Open(full)
	if err != nil {
		return out, fmt.Errorf("open the file: %w", err)
	}
	defer in.Close()
	first := make([]byte, qcow2.DetectLength)
	n, err := in.ReadAt(first, 0)
	if err != nil && err != io.EOF {
		return out, fmt.Errorf("read %s: %w", full, err)
	}
	if virtual, ok := qcow2.VirtualSize(first[:n]); ok {
		if len(diffs) > 0 {
			return out, session.Usagef("%s is a QCOW2 image: a DIFF can be applied only to a raw file, or to a full export of the format diff", full)
		}
		return packedFile{path: full, size: virtual}, nil
	}
	sources := append([]string{full}, diffs...)
	if out, err = createPacked(name, sources); err != nil {
		return out, err
	}
	err = s.Wait("reading "+full, func(func(string)) error {
		raw, size, err := merge(ctx, full, in, diffs)
		if err != nil {
			return err
		}
		defer raw.Close()
		if raw != in {
			defer os.Remove(raw.Name())
		}
		out.size = size
		return pack(ctx, raw, size, out.temporary)
	})
	if err == nil {
		err = keepTime(out.path, sources)
	}
	if err != nil {
		out.remove()
		out.close()
	}
	return out, err
}

// keepTime sets the modification time of a file to the latest one of its sources. A repeated command therefore
// continues the upload of an equal file.
func keepTime(path string, sources []string) error {
	var latest time.Time
	for _, one := range sources {
		info, err := os.Stat(one)
		if err != nil {
			return fmt.Errorf("read %s: %w", one, err)
		}
		if info.ModTime().After(latest) {
			latest = info.ModTime()
		}
	}
	if err := os.Chtimes(path, latest, latest); err != nil {
		return fmt.Errorf("set the time of %s: %w", path, err)
	}
	return nil
}

// merge returns a raw file with the content of the full file in and the diffs, and its size in bytes. It returns in
// itself if that is a raw file and there are no diffs, and otherwise a temporary file.
func merge(ctx context.Context, full string, in *os.File, diffs []string) (raw *os.File, size uint64, err error) {
	info, err := in.Stat()
	if err != nil {
		return nil, 0, fmt.Errorf("read %s: %w", full, err)
	}
	whole, err := rbddiff.NewReader(in)
	isDiff := err == nil
	if !isDiff && (!errors.Is(err, rbddiff.ErrFormat) || isExport(in)) {
		return nil, 0, fmt.Errorf("read %s: %w", full, err)
	}
	if !isDiff && len(diffs) == 0 {
		return in, uint64(info.Size()), nil
	}
	merged, err := os.CreateTemp(filepath.Dir(full), ".trivet-import-*")
	if err != nil {
		return nil, 0, fmt.Errorf("make a temporary file: %w", err)
	}
	defer func() {
		if err != nil {
			merged.Close()
			os.Remove(merged.Name())
		}
	}()
	last := ""
	if isDiff {
		if from := whole.Header().From; from != "" {
			return nil, 0, session.Usagef("%s has only the changes since snapshot %s: give the full export first", full, from)
		}
		if size, last, err = applyDiff(ctx, merged, full, whole); err != nil {
			return nil, 0, err
		}
	} else {
		size = uint64(info.Size())
		if err := copyData(ctx, merged, in, info.Size()); err != nil {
			return nil, 0, err
		}
	}
	for _, one := range diffs {
		if size, last, err = applyFile(ctx, merged, one, last); err != nil {
			return nil, 0, err
		}
	}
	return merged, size, nil
}

// isExport reports whether a file is an export of Ceph. Such a file is never the raw content of a disk, even if rbddiff
// cannot read its version or header.
func isExport(f *os.File) bool {
	first := make([]byte, rbddiff.DetectLength)
	n, err := f.ReadAt(first, 0)
	return (err == nil || err == io.EOF) && rbddiff.IsExport(first[:n])
}

// applyFile applies the diff in a file. If last is not empty, the diff must have the changes since the snapshot last.
func applyFile(ctx context.Context, raw *os.File, path, last string) (size uint64, to string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, "", fmt.Errorf("open the file: %w", err)
	}
	defer f.Close()
	diff, err := rbddiff.NewReader(f)
	if err != nil {
		return 0, "", fmt.Errorf("read %s: %w", path, err)
	}
	from := diff.Header().From
	if from == "" {
		return 0, "", session.Usagef("%s is a full export: it can only be the first file", path)
	}
	if last != "" && from != last {
		return 0, "", session.Usagef("%s has the changes since snapshot %s, but the file before it has the content of snapshot %s", path, from, last)
	}
	return applyDiff(ctx, raw, path, diff)
}

// applyDiff applies a diff to a raw file, and returns the new size and the name of the diff's snapshot.
func applyDiff(ctx context.Context, raw *os.File, path string, diff *rbddiff.Reader) (size uint64, to string, err error) {
	h := diff.Header()
	if err := raw.Truncate(int64(h.Size)); err != nil {
		return 0, "", fmt.Errorf("write a temporary file: %w", err)
	}
	for {
		r, err := diff.Next()
		if err == io.EOF {
			return h.Size, h.To, nil
		}
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return 0, "", fmt.Errorf("read %s: %w", path, err)
		}
		if err := writeRange(ctx, raw, r); err != nil {
			return 0, "", fmt.Errorf("write a temporary file: %w", err)
		}
	}
}

// writeRange writes a range to a raw file. It writes zeros only where the file has data: a range of zeros may be as
// large as the disk, and must not fill the file system.
func writeRange(ctx context.Context, raw *os.File, r rbddiff.Range) error {
	if r.Data != nil {
		_, err := raw.WriteAt(r.Data, int64(r.Offset))
		return err
	}
	return eachData(ctx, raw, int64(r.Offset), int64(r.Offset+r.Length), func(at int64, data []byte) error {
		clear(data)
		_, err := raw.WriteAt(data, at)
		return err
	})
}

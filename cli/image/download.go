package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

func downloadCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use:   "download IMAGE FILE",
		Short: "Download the bytes of an image",
		Long: `Download the bytes of an image, as stored, to a file on this host, and compare the checksums. Until the download is
complete, the file is called FILE.part. If the download is interrupted, the same command continues it.`,
		Args: session.Exactly("IMAGE", "FILE"),
	}
	c.ValidArgsFunction = session.FirstArg(Names(s))
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		id, err := findObject(ctx, s, conn, args[0], true, usable)
		if err != nil {
			return err
		}
		org, _ := s.Tenant()
		image, err := vmv1.NewImageServiceClient(conn).GetImage(ctx, &vmv1.GetImageRequest{OrgId: org, ImageId: id})
		if err != nil {
			return err
		}
		if image.GetStatus() != vmv1.ImageStatus_IMAGE_STATUS_AVAILABLE {
			return session.Errorf(codes.FailedPrecondition, "", "image %s is %s, not AVAILABLE", args[0], show.Enum("IMAGE_STATUS", image.GetStatus()))
		}
		d := &download{s: s, conn: conn, org: org, image: image}
		if err := d.run(ctx, args[1]); err != nil {
			return err
		}
		return s.Done(args[1], "downloaded")
	})
	return c
}

// download is one run of the command that downloads an image.
type download struct {
	s     *session.Session
	conn  *dial.Conn
	org   string
	image *vmv1.Image
}

// run downloads the image to the file at path.
func (d *download) run(ctx context.Context, path string) error {
	if _, err := os.Lstat(path); err == nil {
		return session.Errorf(codes.AlreadyExists, "give another name, or remove it", "%s exists", path)
	}
	part := path + ".part"
	file, err := os.OpenFile(part, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("make the file: %w", err)
	}
	defer file.Close()
	err = d.s.Wait("downloading "+d.image.GetName(), func(say func(string)) error { return d.fill(ctx, file, say) })
	if errors.Is(err, errOtherBytes) {
		os.Remove(part)
		return err
	}
	if err != nil {
		d.s.Note("the download of %s is not complete: run the same command again to continue it", d.image.GetName())
		return err
	}
	if err := errors.Join(file.Sync(), os.Rename(part, path)); err != nil {
		return fmt.Errorf("store the file: %w", err)
	}
	return nil
}

var errOtherBytes = errors.New("the downloaded bytes do not have the checksum of the image: they were removed; download it again")

// fill downloads the bytes of the image that the file does not have yet, appends them, and verifies the checksum of the
// whole file.
func (d *download) fill(ctx context.Context, file *os.File, say func(string)) error {
	sum := sha256.New()
	size, err := io.Copy(sum, io.LimitReader(file, int64(d.image.GetSizeBytes())+1))
	if err != nil {
		return fmt.Errorf("read the file: %w", err)
	}
	total := int64(d.image.GetSizeBytes())
	if size > total {
		return errOtherBytes
	}
	client := storagev1.NewImageDataServiceClient(d.conn)
	for size < total {
		before := size
		err := Persist(ctx, d.conn, func(ctx context.Context) error {
			stream, err := client.DownloadImage(ctx, &storagev1.DownloadImageRequest{OrgId: d.org, ImageId: d.image.GetId(), Offset: uint64(size)})
			if err != nil {
				return err
			}
			for {
				piece, err := stream.Recv()
				if errors.Is(err, io.EOF) {
					return nil
				}
				if err != nil {
					return err
				}
				if _, err := file.Write(piece.GetData()); err != nil {
					return fmt.Errorf("write the file: %w", err)
				}
				sum.Write(piece.GetData())
				size += int64(len(piece.GetData()))
				say(fmt.Sprintf("downloading %s: %s", d.image.GetName(), show.Bar(size, total)))
			}
		})
		if err != nil && (size == before || !IsOutage(err)) {
			return err
		}
		if size == before || size > total {
			return errOtherBytes
		}
	}
	if "sha256:"+hex.EncodeToString(sum.Sum(nil)) != d.image.GetChecksum() {
		return errOtherBytes
	}
	return nil
}

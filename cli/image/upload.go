package image

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/retry"
)

const (
	// partSize is the size of the parts of an upload, in bytes. It is the largest size that the control plane accepts.
	partSize = 8 << 20
	// maxParts is the maximum number of parts of an upload.
	maxParts = 10_000
	// partTime is the maximum time of one attempt to send a part.
	partTime = time.Minute
	// outageTime is how long a call of an upload or download is repeated while no control plane member can serve it.
	outageTime = 2 * time.Minute
	// abortTime is the maximum time for ending an upload that cannot be continued.
	abortTime = 5 * time.Second
)

func uploadCommand(s *session.Session) *cobra.Command {
	var f importFlags
	c := &cobra.Command{
		Use:        "upload NAME FILE|-",
		SuggestFor: []string{"add", "create"},
		Short:      "Create an image from a file on this host",
		Long: `Create an image from a file on this host, or from standard input (-). The file is sent in parts.
If the upload of a file is interrupted, the same command continues it within 24 hours and sends only the parts that are
missing. The command waits until a majority of the members stores the image, and compares the checksums.`,
		Example: "  trivet image upload debian debian-12-genericcloud-amd64.qcow2",
		Args:    session.Exactly("NAME", "FILE"),
	}
	f.add(c)
	c.ValidArgsFunction = completeFile
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		req, err := f.describe(args[0])
		if err != nil {
			return err
		}
		req.OrgId, _ = s.Tenant()
		u := &upload{s: s, conn: conn, images: vmv1.NewImageServiceClient(conn), req: req, wait: f.wait}
		image, err := u.run(ctx, args[1])
		if err != nil {
			return err
		}
		return printImage(ctx, s, image)
	})
	return c
}

// Upload uploads the file at path as a private image of the org with a name, and waits until the image is AVAILABLE. If
// an earlier call with the same arguments was interrupted, Upload continues it.
func Upload(ctx context.Context, s *session.Session, conn *dial.Conn, name, path string) (*vmv1.Image, error) {
	req := &vmv1.CreateImageRequest{Name: name}
	req.OrgId, _ = s.Tenant()
	u := &upload{s: s, conn: conn, images: vmv1.NewImageServiceClient(conn), req: req}
	return u.run(ctx, path)
}

// upload is one run of the command that uploads an image.
type upload struct {
	s      *session.Session
	conn   *dial.Conn
	images vmv1.ImageServiceClient
	req    *vmv1.CreateImageRequest
	wait   session.Waiting

	state savedUpload
	// path is the file in which state is stored, so that a later run continues the upload. It is empty for standard
	// input, whose upload cannot be continued.
	path string
	// stored holds the SHA-256 of the parts that the control plane stores already, by number.
	stored map[uint32]string
	// completed is true if an earlier run has completed the session. All parts are stored then.
	completed bool
	sum       hash.Hash
}

// run uploads the file at path, or standard input if path is "-".
func (u *upload) run(ctx context.Context, path string) (image *vmv1.Image, err error) {
	in, size := u.s.Stdin, int64(0)
	if path == "-" {
		if err := u.begin(ctx); err != nil {
			return nil, err
		}
	} else {
		file, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("open the image: %w", err)
		}
		defer file.Close()
		info, err := file.Stat()
		switch {
		case err != nil:
			return nil, fmt.Errorf("open the image: %w", err)
		case !info.Mode().IsRegular():
			return nil, session.Usagef("%s is not a regular file: to read a pipe or a device, give it as standard input and - as FILE", path)
		case info.Size() == 0:
			return nil, session.Usagef("%s is empty", path)
		case info.Size() > maxParts*partSize:
			return nil, session.Usagef("%s is larger than %s", path, show.Bytes(maxParts*partSize))
		}
		in, size = file, info.Size()
		if err := u.resume(ctx, path, info); err != nil {
			return nil, err
		}
	}
	err = u.s.Wait("uploading "+u.req.GetName(), func(say func(string)) error {
		if err := u.send(ctx, in, size, say); err != nil {
			return err
		}
		image, err = u.complete(ctx, say)
		return err
	})
	if err != nil {
		u.explain()
		return nil, err
	}
	if u.path != "" {
		os.Remove(u.path)
	}
	return image, u.check(image)
}

// begin begins a new upload session.
func (u *upload) begin(ctx context.Context) error {
	r := u.req
	out, err := u.images.BeginImageUpload(ctx, &vmv1.BeginImageUploadRequest{
		Name: r.GetName(), OrgId: r.GetOrgId(), Visibility: r.GetVisibility(), Format: r.GetFormat(), OsType: r.GetOsType(),
		OsVersion: r.GetOsVersion(), Architecture: r.GetArchitecture(), MinDiskGib: r.GetMinDiskGib(),
		MinMemoryMib: r.GetMinMemoryMib(), Metadata: r.GetMetadata(),
	})
	if err != nil {
		return err
	}
	u.state.Image, u.state.Session = out.GetImage().GetId(), out.GetUploadSessionId()
	u.stored = map[uint32]string{}
	return nil
}

// send sends the parts of in that the control plane does not store. size is the length of in, or 0 if it is unknown.
func (u *upload) send(ctx context.Context, in io.Reader, size int64, say func(string)) error {
	u.sum = sha256.New()
	buf := make([]byte, partSize)
	done := int64(0)
	for n := uint32(1); ; n++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		length, err := io.ReadFull(in, buf)
		switch {
		case errors.Is(err, io.EOF) && n > 1:
			return nil
		case errors.Is(err, io.EOF):
			return errors.New("there is nothing to upload: the input is empty")
		case err != nil && !errors.Is(err, io.ErrUnexpectedEOF):
			return fmt.Errorf("read the image: %w", err)
		case n > maxParts:
			return fmt.Errorf("the input is larger than %s", show.Bytes(maxParts*partSize))
		}
		body := buf[:length]
		u.sum.Write(body)
		sum := sha256.Sum256(body)
		if !u.completed && u.stored[n] != hex.EncodeToString(sum[:]) {
			if err := u.sendPart(ctx, n, body); err != nil {
				return err
			}
		}
		done += int64(length)
		say(fmt.Sprintf("uploading %s: %s", u.req.GetName(), show.Bar(done, size)))
	}
}

// sendPart sends one part. While no member can take the part, sendPart repeats the call for up to outageTime.
func (u *upload) sendPart(ctx context.Context, n uint32, body []byte) error {
	return Persist(ctx, u.conn, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, partTime)
		defer cancel()
		_, err := u.images.UploadImagePart(ctx, &vmv1.UploadImagePartRequest{
			OrgId: u.req.GetOrgId(), ImageId: u.state.Image, UploadSessionId: u.state.Session, PartNumber: n, Body: body,
		})
		return err
	})
}

// complete completes the session. It returns the image when the image is AVAILABLE or ERROR. With --no-wait it returns
// the image at once.
func (u *upload) complete(ctx context.Context, say func(string)) (image *vmv1.Image, err error) {
	for {
		err := Persist(ctx, u.conn, func(ctx context.Context) (err error) {
			ctx, cancel := context.WithTimeout(ctx, partTime)
			defer cancel()
			image, err = u.images.CompleteImageUpload(ctx, &vmv1.CompleteImageUploadRequest{
				OrgId: u.req.GetOrgId(), ImageId: u.state.Image, UploadSessionId: u.state.Session,
			})
			return err
		})
		if err != nil || !u.wait.On() || settled(image) {
			return image, err
		}
		say(fmt.Sprintf("storing %s: %s", image.GetName(), show.Enum("IMAGE_STATUS", image.GetStatus())))
		if err := dial.Sleep(ctx, firstPoll); err != nil {
			return nil, err
		}
	}
}

// check returns an error unless the stored image has the checksum of the bytes that this run read.
func (u *upload) check(image *vmv1.Image) error {
	if err := failure(image, "uploaded"); err != nil {
		return err
	}
	sum := hex.EncodeToString(u.sum.Sum(nil))
	converted := strings.EqualFold(image.GetMetadata()[cloud.SourceSHA256], sum) // then the checksum is another one
	if image.GetChecksum() != "" && image.GetChecksum() != "sha256:"+sum && !converted {
		return fmt.Errorf("image %s (%s) has the checksum %s, but sha256:%s was uploaded: the file changed meanwhile; delete the image and upload it again",
			image.GetName(), image.GetId(), image.GetChecksum(), sum)
	}
	return nil
}

// failure returns an error if the image is in the status ERROR. done completes the error text "could not be", for
// example with "imported".
func failure(image *vmv1.Image, done string) error {
	if image.GetStatus() != vmv1.ImageStatus_IMAGE_STATUS_ERROR {
		return nil
	}
	return session.Errorf(codes.OK, fmt.Sprintf("`trivet image delete %s` removes its record", image.GetId()), "image %s could not be %s: %s",
		image.GetName(), done, image.GetMetadata()[cloud.ImageReason])
}

// explain tells the user how to continue an upload that was interrupted. An upload of standard input cannot be
// continued, so explain ends it.
func (u *upload) explain() {
	if u.path != "" {
		u.s.Note("the upload of %s is not complete: run the same command again to continue it", u.req.GetName())
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), abortTime)
	defer cancel()
	if _, err := u.images.AbortImageUpload(ctx, &vmv1.AbortImageUploadRequest{
		OrgId: u.req.GetOrgId(), ImageId: u.state.Image, UploadSessionId: u.state.Session,
	}); err != nil {
		u.s.Note("the image of the interrupted upload is left over: `trivet image delete %s` removes it", u.state.Image)
	}
}

// listStored reads which parts the control plane stores, or that the session is complete. It returns false if the
// upload cannot be continued, because the session has expired or the image was deleted.
func (u *upload) listStored(ctx context.Context) (open bool, err error) {
	data := storagev1.NewImageDataServiceClient(u.conn)
	u.stored = map[uint32]string{}
	in := &storagev1.ListUploadedPartsRequest{OrgId: u.req.GetOrgId(), ImageId: u.state.Image, UploadSessionId: u.state.Session}
	for {
		var out *storagev1.ListUploadedPartsResponse
		err := Persist(ctx, u.conn, func(ctx context.Context) (err error) {
			out, err = data.ListUploadedParts(ctx, in)
			return err
		})
		switch status.Code(err) {
		case codes.OK:
		case codes.NotFound:
			return false, nil
		case codes.FailedPrecondition:
			image, err := u.images.GetImage(ctx, &vmv1.GetImageRequest{OrgId: u.req.GetOrgId(), ImageId: u.state.Image})
			u.completed = err == nil && image.GetStatus() != vmv1.ImageStatus_IMAGE_STATUS_ERROR
			return u.completed, err
		default:
			return false, err
		}
		for _, p := range out.GetParts() {
			u.stored[p.GetPartNumber()] = p.GetSha256()
			in.AfterPartNumber = p.GetPartNumber()
		}
		if !out.GetMore() {
			return true, nil
		}
	}
}

// Persist calls f again, for up to outageTime, while no member can be reached, members return UNAVAILABLE, or a member
// does not answer in time.
func Persist(ctx context.Context, conn *dial.Conn, f func(context.Context) error) error {
	var last error
	_ = retry.Do(ctx, retry.Pauses{First: firstPoll, Last: lastPoll, Within: outageTime}, func() error {
		last = f(ctx)
		if ctx.Err() != nil || !IsOutage(last) {
			return retry.Permanent(last)
		}
		if status.Code(last) == codes.DeadlineExceeded {
			conn.Next()
		}
		return last
	})
	return cmp.Or(ctx.Err(), last)
}

// IsOutage reports whether err means that no member could serve a call now.
func IsOutage(err error) bool {
	code := status.Code(err)
	return code == codes.Unavailable || code == codes.DeadlineExceeded
}

package image

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// downloadChunk is the maximum size of a piece of a download, in bytes.
const downloadChunk = 256 << 10

// Download calls send with the bytes of an image from an offset to the end, in pieces of at most downloadChunk. It
// reads the image file of this member or, if this member has none, that of another member. If a read fails, Download
// continues at the same offset with the next member that has the image. It returns NotFound unless org may use the
// image.
func (s *Service) Download(ctx context.Context, org cloud.OrgID, id cloud.ImageID, offset uint64, send func([]byte) error) error {
	if err := cloud.CheckUUID("image_id", string(id)); err != nil {
		return err
	}
	var i *Usable
	if err := s.opts.Store.View(ctx, func(v *store.View) (err error) {
		i, err = Lookup(v, org, id)
		return err
	}); err != nil {
		return err
	}
	if offset > i.SizeBytes {
		return fault.New(fault.OutOfRange, "offset: the image has %d bytes, got %d", i.SizeBytes, offset)
	}
	errs := []error{s.sendFrom(ctx, s.opts.Self, &i.Image, &offset, send)}
	for _, member := range i.Holders {
		var stopped *sendError
		if errs[len(errs)-1] == nil || errors.As(errs[len(errs)-1], &stopped) || ctx.Err() != nil {
			return errors.Join(errs[len(errs)-1], ctx.Err())
		}
		if member != s.opts.Self {
			errs = append(errs, s.sendFrom(ctx, member, &i.Image, &offset, send))
		}
	}
	if errs[len(errs)-1] == nil {
		return nil
	}
	return fault.New(fault.Unavailable, "no member that has the image can be reached").Because(errors.Join(errs...)).MayRetry()
}

// sendError wraps an error that the send function of Download returned: the client cannot be reached, so another
// member's file would not help.
type sendError struct{ error }

func (e *sendError) Unwrap() error { return e.error }

// sendFrom sends the rest of an image from one member's file, and increases offset by the number of bytes sent.
func (s *Service) sendFrom(ctx context.Context, member uint64, i *cloud.Image, offset *uint64, send func([]byte) error) error {
	r, err := s.openAt(ctx, member, i.SHA256, *offset)
	if err != nil {
		return err
	}
	defer r.Close()
	buf := make([]byte, downloadChunk)
	for ctx.Err() == nil {
		n, err := r.Read(buf)
		if n > 0 {
			if err := send(buf[:n]); err != nil {
				return &sendError{err}
			}
			*offset += uint64(n)
		}
		switch {
		case err == io.EOF && *offset == i.SizeBytes:
			return nil
		case err == io.EOF:
			return fmt.Errorf("member %d: %w", member, io.ErrUnexpectedEOF)
		case err != nil:
			return err
		}
	}
	return ctx.Err()
}

// openAt opens a member's file at an offset. The member may be this one.
func (s *Service) openAt(ctx context.Context, member uint64, sum string, offset uint64) (io.ReadCloser, error) {
	if member != s.opts.Self {
		return s.opts.Peers.ReadImage(ctx, member, sum, offset)
	}
	f, err := s.opts.Files.Open(sum)
	if err != nil {
		return nil, err
	}
	if _, err := f.Seek(int64(offset), io.SeekStart); err != nil {
		f.Close()
		return nil, fmt.Errorf("seek in image: %w", err)
	}
	return f, nil
}

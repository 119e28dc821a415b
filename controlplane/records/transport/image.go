package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	peerv1 "github.com/trivet-cloud/trivet/protos/peer/v1"
)

// imageStall is the maximum time that Read of an image waits for data; Read fails afterwards.
const imageStall = 15 * time.Second

var errStalled = errors.New("the member stopped sending the image")

// ReadImage returns a reader of an image that another member stores, from a byte offset on. Read fails if the member
// sends nothing for imageStall. Call Close when the reader is no longer needed.
func (m *Transport) ReadImage(ctx context.Context, member uint64, sha256 string, offset uint64) (io.ReadCloser, error) {
	client, err := m.reach(ctx, member)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	s, err := client.ReadImage(ctx, &peerv1.ReadImageRequest{Sha256: sha256, Offset: offset})
	if err != nil {
		cancel(nil)
		return nil, fmt.Errorf("read image from member %d: %w", member, err)
	}
	return &imageReader{member: member, ctx: ctx, cancel: cancel, stall: imageStall, recv: s.Recv}, nil
}

// imageReader reads an image from another member. Only one goroutine may call Read.
type imageReader struct {
	member uint64
	ctx    context.Context
	cancel context.CancelCauseFunc
	stall  time.Duration
	recv   func() (*peerv1.ReadImageResponse, error)
	rest   []byte
}

func (r *imageReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if err := r.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func (r *imageReader) fill() error {
	stalled := time.AfterFunc(r.stall, func() { r.cancel(errStalled) })
	piece, err := r.recv()
	stalled.Stop()
	switch {
	case err == nil:
		r.rest = piece.GetData()
		return nil
	case errors.Is(err, io.EOF):
		return io.EOF
	case errors.Is(context.Cause(r.ctx), errStalled):
		err = errStalled
	}
	return fmt.Errorf("read image from member %d: %w", r.member, err)
}

// Close ends the transfer.
func (r *imageReader) Close() error {
	r.cancel(nil)
	return nil
}

// partTime is the maximum time for storing a part of an image upload on another member.
const partTime = 30 * time.Second

// StorePart stores a part of an image upload on another member. It returns when that member has synced the part to its
// disk.
func (m *Transport) StorePart(ctx context.Context, member uint64, sha256 string, part []byte) error {
	client, err := m.reach(ctx, member)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, partTime)
	defer cancel()
	s, err := client.StoreImagePart(ctx)
	if err != nil {
		return fmt.Errorf("store a part on member %d: %w", member, err)
	}
	request := &peerv1.StoreImagePartRequest{Sha256: sha256}
	for piece := range slices.Chunk(part, chunk) {
		request.Data = piece
		if err := s.Send(request); err != nil {
			break // CloseAndRecv returns the reason
		}
		request = &peerv1.StoreImagePartRequest{}
	}
	if _, err := s.CloseAndRecv(); err != nil {
		return fmt.Errorf("store a part on member %d: %w", member, err)
	}
	return nil
}

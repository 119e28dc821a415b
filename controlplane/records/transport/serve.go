package transport

import (
	"context"
	"errors"
	"io"

	peerv1 "github.com/trivet-cloud/trivet/protos/peer/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// service implements the gRPC service. It is a type of its own because Transport has client methods of the same names.
type service struct {
	peerv1.UnsafePeerServiceServer
	m *Transport
}

func (s *service) SendSnapshot(stream peerv1.PeerService_SendSnapshotServer) error {
	return s.m.receiveSnapshot(stream)
}

func (s *service) Call(ctx context.Context, r *peerv1.CallRequest) (*peerv1.CallResponse, error) {
	if answer, ours, err := s.m.serveDirect(ctx, r); ours {
		return answer, err
	}
	if _, err := s.m.sender(ctx); err != nil {
		return nil, err
	}
	caller, err := callerOf(r)
	if err != nil {
		return nil, err
	}
	body, err := s.m.commands.Serve(ctx, r.GetCommand(), r.GetBody(), caller)
	if err != nil && ctx.Err() != nil {
		return nil, ctx.Err() // the caller canceled or its deadline passed, which is no error of this member
	}
	notLeader, encoded, internal := encodeError(err)
	return &peerv1.CallResponse{Body: body, NotLeader: notLeader, Fault: encoded, Internal: internal}, nil
}

func (s *service) Open(r *peerv1.CallRequest, stream peerv1.PeerService_OpenServer) error {
	if _, err := s.m.sender(stream.Context()); err != nil {
		return err
	}
	caller, err := callerOf(r)
	if err != nil {
		return err
	}
	err = s.m.commands.ServeStream(stream.Context(), r.GetCommand(), r.GetBody(), caller, func(piece []byte) error {
		return stream.Send(&peerv1.OpenResponse{Data: piece})
	})
	if err == nil {
		return nil
	}
	if ctx := stream.Context(); ctx.Err() != nil {
		return ctx.Err()
	}
	notLeader, encoded, internal := encodeError(err)
	return stream.Send(&peerv1.OpenResponse{NotLeader: notLeader, Fault: encoded, Internal: internal})
}

func (s *service) Exchange(stream peerv1.PeerService_ExchangeServer) error {
	ctx := stream.Context()
	if _, err := s.m.sender(ctx); err != nil {
		return err
	}
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	r := first.GetCall()
	caller, err := callerOf(r)
	if err != nil {
		return err
	}
	next := rpc.Receiver(ctx, stream.Recv)
	err = s.m.commands.ServeExchange(ctx, r.GetCommand(), r.GetBody(), caller, leader.Pipe{
		Recv: func(ctx context.Context) ([]byte, error) {
			piece, err := next(ctx)
			return piece.GetData(), err
		},
		Send: func(piece []byte) error { return stream.Send(&peerv1.OpenResponse{Data: piece}) },
	})
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	notLeader, encoded, internal := encodeError(err)
	return stream.Send(&peerv1.OpenResponse{NotLeader: notLeader, Fault: encoded, Internal: internal})
}

func (s *service) ReadImage(r *peerv1.ReadImageRequest, stream peerv1.PeerService_ReadImageServer) error {
	if _, err := s.m.sender(stream.Context()); err != nil {
		return err
	}
	f, err := s.m.images.Open(r.GetSha256())
	if err != nil {
		return err
	}
	defer f.Close()
	return Chunks(f, r.GetOffset(), func(b []byte) error { return stream.Send(&peerv1.ReadImageResponse{Data: b}) })
}

func (s *service) StoreImagePart(stream peerv1.PeerService_StoreImagePartServer) error {
	if _, err := s.m.sender(stream.Context()); err != nil {
		return err
	}
	first, err := stream.Recv()
	if errors.Is(err, io.EOF) {
		return fault.Invalid("sha256", "is required")
	}
	if err != nil {
		return err
	}
	r := &partReader{rest: first.GetData(), recv: stream.Recv}
	if err := s.m.images.StorePart(stream.Context(), first.GetSha256(), r); err != nil {
		return err
	}
	return stream.SendAndClose(&peerv1.StoreImagePartResponse{})
}

// partReader reads the data of a stream that stores a part of an image upload.
type partReader struct {
	rest []byte
	recv func() (*peerv1.StoreImagePartRequest, error)
}

func (r *partReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		piece, err := r.recv()
		if err != nil {
			return 0, err // io.EOF after the last message
		}
		r.rest = piece.GetData()
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// chunk is the size of a piece of an image or a snapshot, in bytes.
const chunk = 256 << 10

// Chunks reads f from a byte offset to its end and calls send with pieces of at most 256 KiB.
func Chunks(f io.ReadSeeker, offset uint64, send func([]byte) error) error {
	if _, err := f.Seek(int64(offset), io.SeekStart); err != nil || int64(offset) < 0 {
		return fault.Invalid("offset", "is outside of the image")
	}
	buf := make([]byte, chunk)
	for {
		n, err := io.ReadFull(f, buf)
		if n > 0 {
			if err := send(buf[:n]); err != nil {
				return err
			}
		}
		switch err {
		case nil:
		case io.EOF, io.ErrUnexpectedEOF:
			return nil
		default:
			return err
		}
	}
}

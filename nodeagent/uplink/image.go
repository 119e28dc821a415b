package uplink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

// imageWithin bounds the wait for the next piece of an image.
const imageWithin = 15 * time.Second

// ErrNoImage means that every member that answered holds no verified copy of an image, or none answered.
var ErrNoImage = errors.New("no member gives the image")

// FetchImage reads an image from an offset on: from the member of the present session, else from any other. The caller
// verifies what it reads and closes the reader; an error in the middle may be followed by another FetchImage from where
// it came to. ctx bounds the whole reading.
func (l *Link) FetchImage(ctx context.Context, sha256 string, offset uint64) (io.ReadCloser, error) {
	request := &agentv1.ReadImageRequest{Sha256: sha256, Offset: offset}
	l.mu.Lock()
	current, asked := l.current, l.status.Member
	l.mu.Unlock()
	var trouble error
	if current != nil {
		r, err := openImage(ctx, current, request)
		if err == nil {
			return r, nil
		}
		trouble = err
	}
	credential := l.identity.credential()
	if credential == nil {
		return nil, fmt.Errorf("%w: this host has not joined", ErrNoImage)
	}
	for _, addr := range l.members() {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if current != nil && addr == asked {
			continue
		}
		conn, err := dial(addr, credential.client())
		if err != nil {
			return nil, err
		}
		r, err := openImage(ctx, conn, request)
		if err == nil {
			r.own = conn
			return r, nil
		}
		conn.Close()
		if trouble == nil || code(trouble) == codes.NotFound {
			trouble = err
		}
	}
	return nil, fmt.Errorf("%w: %w", ErrNoImage, trouble)
}

// openImage starts a stream and waits for its first piece, so that a member without the image is known as such.
func openImage(ctx context.Context, conn *grpc.ClientConn, request *agentv1.ReadImageRequest) (*imageReader, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	stream, err := agentv1.NewAgentServiceClient(conn).ReadImage(ctx, request)
	if err != nil {
		cancel(nil)
		return nil, err
	}
	r := &imageReader{ctx: ctx, cancel: cancel, stream: stream}
	if err := r.fill(); err != nil && !errors.Is(err, io.EOF) {
		cancel(nil)
		return nil, err
	}
	return r, nil
}

var errStalled = errors.New("the member stopped sending the image")

// imageReader is an image on its way.
type imageReader struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	stream grpc.ServerStreamingClient[agentv1.ReadImageResponse]
	own    *grpc.ClientConn // made for this reader; nil when it is the session's
	rest   []byte
	err    error
}

func (r *imageReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		if err := r.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// fill gets the next piece. Its error stays.
func (r *imageReader) fill() error {
	stalled := time.AfterFunc(imageWithin, func() { r.cancel(errStalled) })
	m, err := r.stream.Recv()
	stalled.Stop()
	if err != nil {
		if errors.Is(context.Cause(r.ctx), errStalled) {
			err = errStalled
		}
		r.err = err
		return err
	}
	r.rest = m.GetData()
	return nil
}

// Close ends the stream.
func (r *imageReader) Close() error {
	r.cancel(nil)
	if r.own != nil {
		return r.own.Close()
	}
	return nil
}

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

// imageChunkTimeout is the maximum time until a member sends the next chunk of an image.
const imageChunkTimeout = 15 * time.Second

// ErrNoImage means that no member returned the image: each one either has no verified copy or did not respond.
var ErrNoImage = errors.New("no member provides the image")

// FetchImage opens an image for reading from an offset in bytes. It tries the member of the current session first, then
// all others. The caller must verify the content and close the reader. After a read error, the caller may call
// FetchImage again with the offset reached. ctx applies to the whole transfer.
func (l *Link) FetchImage(ctx context.Context, sha256 string, offset uint64) (io.ReadCloser, error) {
	request := &agentv1.ReadImageRequest{Sha256: sha256, Offset: offset}
	l.mu.Lock()
	current, tried := l.current, l.status.Member
	l.mu.Unlock()
	var lastErr error
	if current != nil {
		r, err := openImage(ctx, current, request)
		if err == nil {
			return r, nil
		}
		lastErr = err
	}
	credential := l.identity.credential()
	if credential == nil {
		return nil, fmt.Errorf("%w: this host has not joined", ErrNoImage)
	}
	for _, addr := range l.members() {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if current != nil && addr == tried {
			continue
		}
		conn, err := l.dial(addr, credential.client())
		if err != nil {
			return nil, err
		}
		r, err := openImage(ctx, conn, request)
		if err == nil {
			r.own = conn
			return r, nil
		}
		conn.Close()
		if lastErr == nil || code(lastErr) == codes.NotFound {
			lastErr = err
		}
	}
	return nil, fmt.Errorf("%w: %w", ErrNoImage, lastErr)
}

// openImage opens a stream of an image and waits for its first chunk, so that it returns the error of a member that
// does not have the image.
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

// imageReader is an io.ReadCloser for the content of an image that a member streams.
type imageReader struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	stream grpc.ServerStreamingClient[agentv1.ReadImageResponse]
	own    *grpc.ClientConn // connection opened for this reader; nil if it uses that of the session
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

// fill receives the next chunk into r.rest. After an error, later reads return the same error.
func (r *imageReader) fill() error {
	stalled := time.AfterFunc(imageChunkTimeout, func() { r.cancel(errStalled) })
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

// Close cancels the stream. It also closes the connection if it was opened for this reader.
func (r *imageReader) Close() error {
	r.cancel(nil)
	if r.own != nil {
		return r.own.Close()
	}
	return nil
}

package session

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
)

// ErrStreamEnded is the error for a stream that the member ended without an error, although the stream has no regular
// end.
var ErrStreamEnded = status.Error(codes.Unavailable, "the stream ended")

// followPause is the time between the end of a broken stream and the next one.
const followPause = 500 * time.Millisecond

// Follow calls stream repeatedly until it returns nil or an error that is not temporary. The function stream opens a
// stream, reads it to its end, and calls heard for each message. UNAVAILABLE and OUT_OF_RANGE are temporary. After
// UNAVAILABLE, Follow switches to another member. OUT_OF_RANGE means that the stream was read too slowly.
//
// Follow returns a temporary error if no stream has had a message for dial.CreatePatience. It returns the error at once
// if no member can be reached and no stream has had a message yet.
func Follow(ctx context.Context, conn *dial.Conn, stream func(ctx context.Context, heard func()) error) error {
	last, ever := time.Now(), false
	for {
		got := false
		err := stream(ctx, func() { got, ever = true, true })
		if got {
			last = time.Now()
		}
		switch status.Code(err) {
		case codes.Unavailable:
			var unreachable *dial.Unreachable
			if !ever && errors.As(err, &unreachable) {
				return err
			}
			conn.Next()
		case codes.OutOfRange:
		default:
			return err
		}
		if time.Since(last) > dial.CreatePatience {
			return err
		}
		if err := dial.Sleep(ctx, followPause); err != nil {
			return err
		}
	}
}

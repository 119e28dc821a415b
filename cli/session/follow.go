package session

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
)

// ErrStreamEnded is the error for a stream that the member ended although there is more to come.
var ErrStreamEnded = status.Error(codes.Unavailable, "the stream ended")

// followPause is the time between the end of a broken stream and the next one.
const followPause = 500 * time.Millisecond

// Follow calls stream, which opens a stream and reads it to its end, again and again until it returns nil or an error
// that will not pass. After UNAVAILABLE, the next stream is opened to another member. After OUT_OF_RANGE, the stream was
// read too slowly and is opened again. stream calls heard for each message. Follow returns the error of the last stream
// if dial.CreatePatience has passed since the end of the last stream with messages, and at once if no member could be
// reached at the beginning.
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

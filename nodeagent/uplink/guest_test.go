package uplink

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

// dataStream is a sendStream that keeps the data, and counts the messages without data.
type dataStream struct {
	nullStream
	data  []byte
	empty int
	most  int // the length of the longest message
}

func (s *dataStream) sendData(p []byte) error {
	if len(p) == 0 {
		s.empty++
	}
	s.most = max(s.most, len(p))
	s.data = append(s.data, p...)
	return nil
}

// TestGuestResult checks that the result of a slow call of a guest agent is sent in pieces, after a message without data
// for each interval of waiting, and that an error of the call is returned.
func TestGuestResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		want := &agentv1.GuestResult{Stdout: bytes.Repeat([]byte("x"), 3*guestChunk), ExitCode: 3}
		var failure error
		l := &Link{o: Options{Guest: func(context.Context, *agentv1.GuestRequest) (*agentv1.GuestResult, error) {
			time.Sleep(3*guestSilence + time.Second)
			return want, failure
		}}}
		s := &dataStream{}
		require.NoError(t, l.writeGuestResult(t.Context(), &agentv1.GuestRequest{}, s))
		require.Equal(t, []int{3, guestChunk}, []int{s.empty, s.most})
		got := &agentv1.GuestResult{}
		require.NoError(t, proto.Unmarshal(s.data, got))
		require.True(t, proto.Equal(want, got))

		failure = errors.New("no guest agent")
		s = &dataStream{}
		require.ErrorIs(t, l.writeGuestResult(t.Context(), &agentv1.GuestRequest{}, s), failure)
		require.Empty(t, s.data)
	})
}

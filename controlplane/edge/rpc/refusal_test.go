package rpc

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestRepeatedRefusalsAreDelayed lets a caller get many ResourceExhausted responses. Those above refusalLimits must be
// delayed, whether the handler or the limit on message sizes refused the call. Other errors and successful calls must
// never be delayed.
func TestRepeatedRefusalsAreDelayed(t *testing.T) {
	var answer error
	address, s, _ := listen(t, &handlers{get: func(context.Context) error { return answer }}, ReceiveTime)
	var mu sync.Mutex
	var slept []time.Duration
	at := time.Now()
	s.intake.refusals.Now = func() time.Time { return at }
	s.intake.refusals.Sleep = func(_ context.Context, d time.Duration) { mu.Lock(); defer mu.Unlock(); slept = append(slept, d) }
	since := func() []time.Duration {
		mu.Lock()
		defer mu.Unlock()
		out := slept
		slept = nil
		return out
	}
	client := vmv1.NewVmServiceClient(dial(t, address))
	call := func(want codes.Code) {
		t.Helper()
		_, err := client.GetVm(with(t, "authorization", "Bearer good"), &vmv1.GetVmRequest{})
		require.Equal(t, want, status.Code(err), "%v", err)
	}
	for range refusalLimits.Burst + 10 {
		answer = fault.New(fault.NotFound, "no such VM")
		call(codes.NotFound)
	}
	answer = fault.New(fault.Throttled, "too many changes")
	for range refusalLimits.Burst {
		call(codes.ResourceExhausted)
	}
	require.Empty(t, since())
	call(codes.ResourceExhausted)
	call(codes.ResourceExhausted)
	require.Equal(t, []time.Duration{refusalLimits.Every, 2 * refusalLimits.Every}, since())
	images := vmv1.NewImageServiceClient(dial(t, address))
	_, err := images.UploadImagePart(with(t, "authorization", "Bearer good"), &vmv1.UploadImagePartRequest{Body: make([]byte, MaxMessage)})
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.Equal(t, []time.Duration{3 * refusalLimits.Every}, since())
	answer = nil
	call(codes.OK)
	answer = fault.New(fault.NotFound, "no such VM")
	call(codes.NotFound)
	require.Empty(t, since())
}

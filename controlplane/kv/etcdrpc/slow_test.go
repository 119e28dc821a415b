package etcdrpc

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

func TestSlowLogOmitsValues(t *testing.T) {
	var out bytes.Buffer
	l := slowLog{log: slog.New(slog.NewTextHandler(&out, nil))}
	put := &pb.PutRequest{Key: bytes.Repeat([]byte("k"), 1000), Value: []byte("secret")}
	for range 50 {
		l.record(t.Context(), pb.KV_Put_FullMethodName, put, nil, time.Second, errors.New("late"))
	}
	l.record(t.Context(), pb.Maintenance_Defragment_FullMethodName, &pb.DefragmentRequest{}, nil, time.Hour, nil)
	require.LessOrEqual(t, strings.Count(out.String(), "\n"), 2*slowPerSecond)
	require.Contains(t, out.String(), "method=Put took=1s")
	require.Contains(t, out.String(), "value_bytes=6")
	require.NotContains(t, out.String(), "secret")
	require.Less(t, out.Len(), 4000)
}

// TestSlowThreshold checks that a request is logged only if it took longer than 300 ms, etcd's default of
// --warning-unary-request-duration.
func TestSlowThreshold(t *testing.T) {
	for took, lines := range map[time.Duration]int{0: 0, 300 * time.Millisecond: 0, 301 * time.Millisecond: 1} {
		var out bytes.Buffer
		l := slowLog{log: slog.New(slog.NewTextHandler(&out, nil))}
		l.record(t.Context(), pb.KV_Put_FullMethodName, &pb.PutRequest{Key: []byte("a")}, nil, took, nil)
		require.Equal(t, lines, strings.Count(out.String(), "\n"), took)
	}
}

func TestSlowLogIsRateLimited(t *testing.T) {
	l := slowLog{}
	now := time.Unix(1000, 0)
	for i := range 100 {
		ok, _ := l.allow(now)
		require.Equal(t, i < slowPerSecond, ok)
	}
	ok, suppressed := l.allow(now.Add(time.Second))
	require.True(t, ok)
	require.Equal(t, 100-slowPerSecond, suppressed)
	_, suppressed = l.allow(now.Add(time.Second))
	require.Zero(t, suppressed)
}

package etcdrpc

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/peer"
)

// slowThreshold is the duration above which a request is logged: etcd's default of --warning-unary-request-duration.
const slowThreshold = 300 * time.Millisecond

// slowPerSecond is the maximum number of slow requests that are logged per second. Under a load that makes all requests
// slow, logging must not make them slower.
const slowPerSecond = 5

// slowLog logs slow requests, and the number of slow requests that it did not log.
type slowLog struct {
	log *slog.Logger

	mu         sync.Mutex
	second     time.Time // start of the current second
	logged     int       // lines written in the current second
	suppressed int       // slow requests that were not logged since the last line
}

// allow reports whether a log line may be written at the time now, and how many slow requests were not logged since the
// previous line.
func (l *slowLog) allow(now time.Time) (ok bool, suppressed int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.second) >= time.Second {
		l.second, l.logged = now, 0
	}
	if l.logged >= slowPerSecond {
		l.suppressed++
		return false, 0
	}
	l.logged++
	suppressed, l.suppressed = l.suppressed, 0
	return true, suppressed
}

// record logs a request of the services KV and Lease that took longer than slowThreshold, with its method, keys and
// sizes, but never with values.
func (l *slowLog) record(ctx context.Context, method string, req, resp any, took time.Duration, err error) {
	if took <= slowThreshold {
		return
	}
	if !strings.HasPrefix(method, Prefix+"KV/") && !strings.HasPrefix(method, Prefix+"Lease/") {
		return
	}
	if r, ok := req.(*pb.CompactionRequest); ok && r.Physical {
		return // a physical compaction waits on purpose, so it is not logged
	}
	ok, suppressed := l.allow(time.Now())
	if !ok {
		return
	}
	attrs := []any{"method", method[strings.LastIndexByte(method, '/')+1:], "took", took, "expected", slowThreshold}
	if p, ok := peer.FromContext(ctx); ok {
		attrs = append(attrs, "remote", p.Addr.String())
	}
	attrs = append(attrs, logAttrs(req, resp)...)
	if err != nil {
		attrs = append(attrs, "err", err)
	}
	if suppressed > 0 {
		attrs = append(attrs, "others", suppressed)
	}
	l.log.Warn("request took too long", attrs...)
}

func logAttrs(req, resp any) []any {
	switch r := req.(type) {
	case *pb.RangeRequest:
		attrs := []any{"key", truncate(r.Key), "range_end", truncate(r.RangeEnd), "limit", r.Limit, "revision", r.Revision, "serializable", r.Serializable}
		if a, ok := resp.(*pb.RangeResponse); ok && a != nil {
			attrs = append(attrs, "count", len(a.Kvs))
		}
		return attrs
	case *pb.PutRequest:
		return []any{"key", truncate(r.Key), "value_bytes", len(r.Value), "lease", r.Lease}
	case *pb.DeleteRangeRequest:
		return []any{"key", truncate(r.Key), "range_end", truncate(r.RangeEnd)}
	case *pb.TxnRequest:
		return []any{"compares", len(r.Compare), "success", len(r.Success), "failure", len(r.Failure)}
	case *pb.CompactionRequest:
		return []any{"revision", r.Revision}
	}
	return nil
}

// truncate returns a key for the log, shortened to 64 bytes.
func truncate(key []byte) string {
	const limit = 64
	if len(key) > limit {
		return string(key[:limit]) + "…"
	}
	return string(key)
}

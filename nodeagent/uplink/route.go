package uplink

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Limits of the pause between two attempts to connect. The pause is about firstPause in the first round over all
// members, and doubles with each round up to lastPause. A random factor of 0.5 to 1.5 is applied, so that not all hosts
// retry at the same time.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 5 * time.Second
	// maxRedirects is the maximum number of errors in a row that name another member as the leader and after which the
	// agent connects to that member without a pause.
	maxRedirects = 3
)

// route chooses the member to connect to next, and the pause before that. Only one goroutine may use it.
type route struct {
	hint      string // the leader that the last error named
	last      string // member tried last
	index     int
	redirects int
	failures  int
}

// next returns the address of the member to try next. If the last error named the leader, next returns the leader's
// address. Otherwise it returns the next address in members, skipping the one that was tried last if there are others.
// members must not be empty.
func (r *route) next(members []string) string {
	if r.hint != "" {
		r.last, r.hint = r.hint, ""
		return r.last
	}
	was := r.last
	for range members {
		r.last = members[r.index%len(members)]
		r.index++
		if r.last != was {
			break
		}
	}
	return r.last
}

// failed must be called after each failed attempt. If the error names another member as the leader, failed stores it
// for the next attempt, at most maxRedirects times in a row. Otherwise failed counts the failure, from which pause is
// computed.
func (r *route) failed(err error) {
	if leader := leaderIn(err); leader != "" && leader != r.last && r.redirects < maxRedirects {
		r.redirects++
		r.hint = leader
		return
	}
	r.redirects = 0
	r.failures++
}

// succeeded must be called after a session that lasted longer than stableSession. It resets the pause to the shortest
// one.
func (r *route) succeeded() { r.failures, r.redirects = 0, 0 }

// pause returns the time to wait before the next attempt. n is the number of members. spread is a random number from 0
// (inclusive) to 1 (exclusive) that varies the result.
func (r *route) pause(n int, spread float64) time.Duration {
	if r.hint != "" {
		return 0
	}
	base := firstPause << min(max(r.failures-1, 0)/max(n, 1), 10)
	return time.Duration(float64(min(base, lastPause)) * (0.5 + spread))
}

// wait returns nil after the pause before the next attempt, or the error of ctx if that ends first.
func (r *route) wait(ctx context.Context, n int) error {
	t := time.NewTimer(r.pause(n, rand.Float64()))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// leaderIn returns the address of the member that an error names as the leader, or "". Such an error has the code
// FAILED_PRECONDITION and an ErrorInfo with metadata `leader`.
func leaderIn(err error) string {
	var g interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &g) || g.GRPCStatus().Code() != codes.FailedPrecondition {
		return ""
	}
	for _, d := range g.GRPCStatus().Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetMetadata()["leader"] != "" {
			return info.GetMetadata()["leader"]
		}
	}
	return ""
}

// code returns the gRPC code in err's chain, or Unknown if there is none.
func code(err error) codes.Code {
	var g interface{ GRPCStatus() *status.Status }
	if errors.As(err, &g) {
		return g.GRPCStatus().Code()
	}
	return codes.Unknown
}

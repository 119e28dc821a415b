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

// The pause between two attempts: about firstPause for the first round over the members, then twice as long each round
// up to lastPause, each spread by half so that hosts do not come in step.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 5 * time.Second
	// hops is how often a refusal that names another member is followed without a pause.
	hops = 3
)

// route decides which member to ask next, and when. It belongs to one goroutine.
type route struct {
	hint   string // the member that leads, as the last answer said
	last   string // asked last
	at     int
	hopped int
	misses int
}

// next is the member to ask now: the one that was named, else another than last time. members is not empty.
func (r *route) next(members []string) string {
	if r.hint != "" {
		r.last, r.hint = r.hint, ""
		return r.last
	}
	was := r.last
	for range members {
		r.last = members[r.at%len(members)]
		r.at++
		if r.last != was {
			break
		}
	}
	return r.last
}

// missed takes note of an attempt that failed, and of where it pointed.
func (r *route) missed(err error) {
	if leader := leaderIn(err); leader != "" && leader != r.last && r.hopped < hops {
		r.hopped++
		r.hint = leader
		return
	}
	r.hopped = 0
	r.misses++
}

// arrived takes note of a session that held.
func (r *route) arrived() { r.misses, r.hopped = 0, 0 }

// pause is how long to wait before the next attempt among n members; spread is in [0, 1).
func (r *route) pause(n int, spread float64) time.Duration {
	if r.hint != "" {
		return 0
	}
	base := firstPause << min(max(r.misses-1, 0)/max(n, 1), 10)
	return time.Duration(float64(min(base, lastPause)) * (0.5 + spread))
}

// wait pauses before the next attempt, or returns the error of ctx.
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

// leaderIn is the member that a refusal names as the leader: FAILED_PRECONDITION with ErrorInfo metadata `leader`.
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

// code is the gRPC code in err's chain; Unknown when there is none.
func code(err error) codes.Code {
	var g interface{ GRPCStatus() *status.Status }
	if errors.As(err, &g) {
		return g.GRPCStatus().Code()
	}
	return codes.Unknown
}

package uplink

import (
	"context"
	"log/slog"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestEvicted checks that an evicted host logs this once, contacts no member again until its token changes, and
// delivers no assignment. The same must hold after a restart. With a new token the host must join and receive
// assignments.
func TestEvicted(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	dir := joined(t, m)
	var token atomic.Value
	token.Store(m.token())
	with := func(o *Options) { o.Token = func() (string, error) { return token.Load().(string), nil } }
	m.set(func() { m.excluded, m.secret = evicted, "another" }) // the host's token is used up

	for range 2 {
		a := open(t, dir, with, m).run(t)
		a.says(t, "evicted from its cluster", "trivet host token", "guests keep running")
		a.says(t, "token was refused")
		require.Equal(t, "n1", string(a.Node()), "the agent must keep its node ID")
		require.Len(t, m.denied, 1)
		require.Len(t, m.joins, 1)
		<-m.denied
		<-m.joins
		a.stop()
		require.Empty(t, m.denied, "the agent must contact a member only once")
		require.Empty(t, a.assigned)
	}

	a := open(t, dir, with, m).run(t)
	a.says(t, "token was refused")
	<-m.joins
	token.Store("not a token")
	a.says(t, "belongs to another cluster")
	token.Store(m.token())
	next(t, m.joins)
	next(t, m.watches)
	m.send <- snapshot(10, 60, "a")
	require.EqualValues(t, 10, next(t, a.assigned).Term)
}

// TestExcludedHostIgnoresStoredAssignment checks that a host which the members exclude (banned or evicted) does not
// deliver the stored assignment; a host that reaches no member does. It also checks that a banned host tries again
// after bannedRetryInterval, and an evicted host does not.
func TestExcludedHostIgnoresStoredAssignment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &Link{stored: &Assignment{Term: 1}, identity: &identity{}}
		l.o.Token = func() (string, error) { return "", os.ErrNotExist }
		l.o.Assign = func(a Assignment) { t.Error("assigned", a) }
		l.o.Log = slog.New(slog.DiscardHandler)
		began := time.Now()
		done := make(chan error, 1)
		go func() { done <- l.waitExcluded(t.Context(), banned) }()
		require.NoError(t, l.deliverStored(t.Context()))
		require.Equal(t, storedDelay, time.Since(began))
		require.NoError(t, <-done)
		require.Equal(t, bannedRetryInterval, time.Since(began))

		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		require.ErrorIs(t, l.waitExcluded(ctx, evicted), context.DeadlineExceeded)
	})
}

// TestExcludedHost checks that exclusionReason accepts only an error with code PERMISSION_DENIED and one of the two
// reasons.
func TestExcludedHost(t *testing.T) {
	refusal := func(code codes.Code, reason string) error {
		s, err := status.New(code, "no").WithDetails(&errdetails.ErrorInfo{Reason: reason})
		require.NoError(t, err)
		return s.Err()
	}
	require.Equal(t, evicted, exclusionReason(refusal(codes.PermissionDenied, evicted)))
	require.Equal(t, banned, exclusionReason(refusal(codes.PermissionDenied, banned)))
	require.Empty(t, exclusionReason(refusal(codes.PermissionDenied, "OTHER")))
	require.Empty(t, exclusionReason(refusal(codes.Unavailable, evicted)))
	require.Empty(t, exclusionReason(status.Error(codes.PermissionDenied, evicted)))
	require.Empty(t, exclusionReason(errWatchEnded))
}

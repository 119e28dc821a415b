package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// newClocks starts three members whose clocks the test can set with SetClock.
func newClocks(t *testing.T) *world {
	t.Helper()
	bin := faulty(t)
	return newWorld(t, func(w *world) {
		w.trio.Bin = bin
		w.trio.Env = func(id int) []string { return []string{lab.ClockEnv(id)} }
	})
}

// skew returns the offset of a member's clock from those of the other members, in seconds, from its metrics. ok is
// false if the metric is absent.
func skew(ctx context.Context, host string) (seconds float64, ok bool, err error) {
	return lab.Metric(ctx, host+":8084", "trivet_clock_skew_seconds")
}

// The method off waits until a member's metrics report that its clock is ahead of the others by the given time, within
// 0.5 s.
func (w *world) off(ctx context.Context, member int, ahead time.Duration) {
	w.t.Helper()
	require.NoError(w.t, lab.Until(ctx, fmt.Sprintf("member %d reports that its clock is %s ahead", member, ahead), func(ctx context.Context) error {
		got, known, err := skew(ctx, w.trio.Members[member])
		if err != nil || !known {
			return errors.Join(err, fmt.Errorf("known: %v", known))
		}
		if d := got - ahead.Seconds(); d < -0.5 || d > 0.5 {
			return fmt.Errorf("the metric is %v s", got)
		}
		return nil
	}))
}

// TestClocksThatDiffer sets the clock of one member, the leader or a follower, forward or back. It checks that with an
// offset of a minute, every member accepts the tokens of every other. A member that is ten minutes off must log an
// error and refuse tokens, and must not change the time of the other members.
func TestClocksThatDiffer(t *testing.T) {
	w := newClocks(t)
	ctx := w.context(4 * time.Minute)
	w.tenant("ada", "acme", "shop", "project:member")
	w.credit(ctx, 2, w.adminToken, 201, http.MethodPost, "/api/v1/wallets", map[string]any{"project_id": "shop", "org_id": "acme", "initial_balance": 1_000_000})
	for member := range w.trio.Members {
		w.off(ctx, member, 0)
	}
	for _, c := range []struct {
		leads bool
		ahead time.Duration
		says  string
	}{
		{true, time.Minute, `level=(WARN|ERROR) msg="this member's clock is \S+ ahead of the others': set it`},
		{true, -time.Minute, `level=(WARN|ERROR) msg="this member's clock is \S+ behind the others': set it`},
		{false, time.Minute, `level=(WARN|ERROR) msg="this member's clock is \S+ ahead of the others': set it`},
		{false, -time.Minute, `level=(WARN|ERROR) msg="this member's clock is \S+ behind the others': set it`},
		{true, 10 * time.Minute, `level=ERROR msg="this member's clock is \S+ ahead of the others': set it`},
		{true, -10 * time.Minute, `level=ERROR msg="this member's clock is \S+ behind the others': set it`},
		{false, 10 * time.Minute, `level=ERROR msg="this member's clock is \S+ ahead of the others': set it`},
		{false, -10 * time.Minute, `level=ERROR msg="this member's clock is \S+ behind the others': set it`},
	} {
		t.Run(fmt.Sprintf("leader %v, %s", c.leads, c.ahead), func(t *testing.T) {
			w, odd := w.of(t), w.leader(1)
			if !c.leads {
				odd = odd%3 + 1
			}
			before := w.log(odd)
			require.NoError(t, w.trio.SetClock(odd, c.ahead))
			w.off(ctx, odd, c.ahead)
			w.says(ctx, odd, before, c.says)
			for other := range w.trio.Members {
				if other != odd {
					w.off(ctx, other, 0)
				}
			}
			w.tokensTravel(ctx, odd, c.ahead.Abs() <= time.Minute)
			if c.ahead.Abs() > time.Minute {
				w.refusesTokens(ctx, odd, c.ahead)
			}
			before = w.log(odd)
			require.NoError(t, w.trio.SetClock(odd, 0))
			w.off(ctx, odd, 0)
			w.says(ctx, odd, before, "clock agrees with the others' again")
		})
	}
	for member := range w.trio.Members {
		require.Less(t, strings.Count(w.log(member), "this member's clock is"), 20, "the member logs the skew too often")
	}
}

// refusesTokens checks that the member odd, whose clock is ten minutes off, refuses to verify and to issue tokens, and
// that the errors contain the reason.
func (w *world) refusesTokens(ctx context.Context, odd int, ahead time.Duration) {
	w.t.Helper()
	way := "ahead of"
	if ahead < 0 {
		way = "behind"
	}
	says := "this member's clock is 10m0s " + way + " the others'"
	_, err := creditv1.NewCreditServiceClient(w.dial(odd, w.adminToken).Conn()).ListWallets(ctx, &creditv1.ListWalletsRequest{})
	require.Equal(w.t, codes.Unavailable, status.Code(err), "%v", err)
	require.ErrorContains(w.t, err, says)
	_, err = w.rest(odd, "").IssueToken(ctx, "ada", "correct horse", nil)
	require.ErrorContains(w.t, err, says)
}

// log returns the content of a member's log.
func (w *world) log(member int) string {
	text, err := os.ReadFile(w.dir.LogFile(w.trio.Name(member)))
	require.NoError(w.t, err)
	return string(text)
}

// says waits until a member's log contains a match of the regular expression in the parameter line. The log must begin
// with the text in the parameter before; only the text after it is searched.
func (w *world) says(ctx context.Context, member int, before, line string) {
	w.t.Helper()
	pattern := regexp.MustCompile(line)
	require.NoError(w.t, lab.Until(ctx, "the log says "+line, func(context.Context) error {
		if fresh := strings.TrimPrefix(w.log(member), before); !pattern.MatchString(fresh) {
			return errors.New(fresh)
		}
		return nil
	}))
}

// tokensTravel checks that a token of each member is accepted by each member, and that a reservation which is created
// with the token expires after the right time by this host's clock. If whole is false, it skips the member with the id
// odd.
func (w *world) tokensTravel(ctx context.Context, odd int, whole bool) {
	w.t.Helper()
	for from := range w.trio.Members {
		if from == odd && !whole {
			continue
		}
		token, err := w.rest(from, "").IssueToken(ctx, "ada", "correct horse", nil)
		require.NoError(w.t, err)
		for at := range w.trio.Members {
			if at == odd && !whole {
				continue
			}
			made, err := creditv1.NewCreditServiceClient(w.dial(at, token).Conn()).
				CreateReservation(ctx, &creditv1.CreateReservationRequest{Amount: 10, TtlSeconds: 300})
			require.NoError(w.t, err, "a token of member %d, at member %d", from, at)
			require.WithinDuration(w.t, time.Now().Add(300*time.Second), time.UnixMilli(made.GetExpiresAt()), 5*time.Second)
		}
	}
}

// The method of returns a copy of w whose methods report failures to t, for a subtest.
func (w *world) of(t *testing.T) *world {
	part := *w
	part.t = t
	return &part
}

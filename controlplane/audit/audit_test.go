package audit

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/auth"
	"github.com/trivet-cloud/trivet/controlplane/lead"
	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/controlplane/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// alone is the leadership of the only member.
type alone struct{}

func (alone) Leader() (uint64, uint64) { return 1, 1 }
func (alone) Changed() <-chan struct{} { return nil }

func newService(t *testing.T, now *time.Time) *Service {
	records := storetest.Memory(t, func() time.Time { return *now })
	return New(Options{Store: records, Commands: lead.NewCommands(1, alone{}, nil), Log: slog.New(slog.DiscardHandler)})
}

func (s *Service) all(t *testing.T) (out []*Record) {
	q := Query{Size: 1000}
	for {
		page, next, err := s.List(t.Context(), q)
		require.NoError(t, err)
		out = append(out, page...)
		if q.Token = next; next == "" {
			return out
		}
	}
}

// Whatever a caller sends, what is written of it can be read again.
func TestWhatIsWrittenCanBeRead(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_000)
	s := newService(t, &now)
	for i, text := range []string{"\xff", "GET /api/v1/vms/\xff\xfe", strings.Repeat("é", 400), "a" + strings.Repeat("é", 400), "\x00", strings.Repeat("\xff", 2000)} {
		s.Failed(&cloud.Caller{User: cloud.UserID(fmt.Sprintf("u%d", i)), Proof: cloud.ProofPassword, Method: text, Target: text, Address: text}, "PERMISSION_DENIED", text)
	}
	_, err := s.opts.Store.Update(t.Context(), func(tx *store.Tx) error {
		Add(tx, &cloud.Caller{User: "ada", Proof: cloud.ProofPassword, Method: "/x/Y", Target: "\xff", RequestID: "r"})
		return nil
	})
	require.NoError(t, err)
	s.flush(t.Context(), time.Second)
	got := s.all(t)
	require.Len(t, got, 7)
	for _, r := range got {
		for _, text := range []string{r.Target, r.Method, r.Message} {
			require.Equal(t, strings.ToValidUTF8(text, ""), text)
			require.LessOrEqual(t, len(text), maxText+len("…"))
		}
	}
	require.NoError(t, s.Prune(t.Context()))
	require.Len(t, s.all(t), 7)
}

// Who proved nothing cannot crowd out what is noted of others, nor take their names.
func TestNobodyIsCrowdedOut(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_000)
	s := newService(t, &now)
	for i := range 500 {
		s.Failed(&cloud.Caller{User: "admin", Proof: cloud.ProofNone, Method: fmt.Sprintf("/m/%d", i), Address: fmt.Sprintf("10.0.0.%d", i%100), Tenant: cloud.Tenant{Org: "acme"}}, "PERMISSION_DENIED", "")
	}
	s.Done(&cloud.Caller{User: "ada", Proof: cloud.ProofPassword, Method: "/identity/IssueToken", Address: "10.0.0.1"})
	s.flush(t.Context(), time.Second)
	got := s.all(t)
	require.Len(t, got, maxNotes+2)
	var of uint64
	named := 0
	for _, r := range got {
		if r.Principal != "" {
			require.Equal(t, "ada", r.Principal)
			named++
			continue
		}
		require.Empty(t, r.Tenant)
		of += r.Suppressed
		if r.Outcome != "SUPPRESSED" {
			of++
			require.Contains(t, r.Target, "claims=admin")
		}
	}
	require.Equal(t, 1, named)
	require.EqualValues(t, 500, of, "each is counted")
}

// Ordinary traffic takes the place of ordinary traffic only.
func TestClassesAreBoundedByThemselves(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_000)
	s := newService(t, &now)
	write := func(method, outcome string, n int) {
		for range n {
			now = now.Add(time.Second)
			_, err := s.opts.Store.Update(auth.With(t.Context(), nil, auth.RPC), func(tx *store.Tx) error {
				put(tx, &Record{Principal: "ada", Method: method, Outcome: outcome})
				return nil
			})
			require.NoError(t, err)
		}
	}
	write("/identity.v1.IdentityService/BindRole", OK, 3)
	write("/vmcontroller.v1.VmService/CreateVm", OK, 4)
	write("/credit.v1.CreditService/CommitReservation", OK, 50)
	write("/identity.v1.IdentityService/BindRole", "PERMISSION_DENIED", 50)
	count := func() map[string]int {
		n := map[string]int{}
		for _, r := range s.all(t) {
			n[r.Method[strings.LastIndex(r.Method, "/")+1:]+" "+r.Outcome]++
		}
		return n
	}
	require.NoError(t, s.prune(t.Context(), [classes]int{policy: 100, changes: 2, credits: 5, refusals: 7}))
	require.Equal(t, map[string]int{"BindRole OK": 3, "CreateVm OK": 2, "CommitReservation OK": 5, "BindRole PERMISSION_DENIED": 7}, count())
	now = now.Add(time.Duration(Keep)*time.Millisecond - 10*time.Second)
	require.NoError(t, s.Prune(t.Context()))
	require.Equal(t, map[string]int{"BindRole PERMISSION_DENIED": 7}, count(), "what is too old goes")
}

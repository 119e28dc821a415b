package audit

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/metricstest"
)

func newService(t *testing.T, now *time.Time) *Service {
	records := storetest.Memory(t, func() time.Time { return *now })
	return New(Options{Store: records, Commands: leadertest.Single(), Log: slog.New(slog.DiscardHandler)})
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

// TestRecordsAreDecodable checks that audit records can be decoded, and their texts are truncated valid UTF-8, whatever
// bytes the caller sent.
func TestRecordsAreDecodable(t *testing.T) {
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

// TestUnauthenticatedNotesAreBounded checks that many refused calls of unauthenticated callers do not displace the
// notes of authenticated ones, and that their records do not have a claimed name as principal.
func TestUnauthenticatedNotesAreBounded(t *testing.T) {
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
	require.EqualValues(t, 500, of, "each refused call must be counted")
	require.Equal(t, map[string]float64{
		"trivet_audit_records_total PERMISSION_DENIED": 500, "trivet_audit_records_total OK": 1, "trivet_audit_records_dropped_total": 250,
	}, metricstest.Values(t, s), "the notes of 50 of the 100 addresses have no room")
}

// TestNotesOfAnOrgAreBounded queues the refused calls of 500 principals of one org within a second, more than are
// written for one org. The calls of another org and of an operator must be written too.
func TestNotesOfAnOrgAreBounded(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_000)
	s := newService(t, &now)
	for i := range 500 {
		s.Failed(&cloud.Caller{
			User: cloud.UserID(fmt.Sprint("robot-", i)), Proof: cloud.ProofAppCred, Method: "/m/X", Tenant: cloud.Tenant{Org: "evil", Project: "lair"},
		}, "PERMISSION_DENIED", "")
	}
	s.Failed(&cloud.Caller{User: "ada", Proof: cloud.ProofPassword, Method: "/m/X", Tenant: cloud.Tenant{Org: "acme", Project: "web"}}, "PERMISSION_DENIED", "")
	s.Done(&cloud.Caller{User: "admin", Proof: cloud.ProofPassword, Method: "/m/Y"})
	s.flush(t.Context(), time.Second)
	seen := map[string]int{}
	for _, r := range s.all(t) {
		seen[string(r.Tenant.Org)+"/"+r.Principal]++
	}
	require.Equal(t, 1, seen["acme/ada"])
	require.Equal(t, 1, seen["/admin"])
	require.Len(t, seen, maxNotesOf+3, "there must be maxNotesOf records of one org, the two others, and the record that counts the rest")
}

// TestClassesHaveSeparateLimits checks that records of one class do not evict those of another class.
func TestClassesHaveSeparateLimits(t *testing.T) {
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
	require.NoError(t, s.prune(t.Context(), [classes]limit{policy: {100, 100, 100}, changes: {2, 2, 2}, credits: {5, 5, 5}, refusals: {7, 7, 7}}))
	require.Equal(t, map[string]int{"BindRole OK": 3, "CreateVm OK": 2, "CommitReservation OK": 5, "BindRole PERMISSION_DENIED": 7}, count())
	now = now.Add(time.Duration(Keep)*time.Millisecond - 10*time.Second)
	require.NoError(t, s.Prune(t.Context()))
	require.Equal(t, map[string]int{"BindRole PERMISSION_DENIED": 7}, count(), "records that are too old must be deleted")
}

// act writes the audit records of n equal calls, one second apart.
func (s *Service) act(t *testing.T, now *time.Time, n int, principal, method, outcome string, at cloud.Tenant) {
	for range n {
		*now = now.Add(time.Second)
		_, err := s.opts.Store.Update(t.Context(), func(tx *store.Tx) error {
			put(tx, &Record{Principal: principal, Method: method, Outcome: outcome, Tenant: at})
			return nil
		})
		require.NoError(t, err)
	}
}

// TestTenantEvictsOnlyItsOwnRecords lets an org produce as many audit records of every class as it can. Prune must
// remove only older records of that org, and none of other orgs, of the cloud, and of what operators did to that org.
func TestTenantEvictsOnlyItsOwnRecords(t *testing.T) {
	const identity, vms = "/identity.v1.IdentityService/", "/vmcontroller.v1.VmService/"
	now := time.UnixMilli(1_800_000_000_000)
	s := newService(t, &now)
	evil, acme := cloud.Tenant{Org: "evil"}, cloud.Tenant{Org: "acme"}
	evilP := cloud.Tenant{Org: "evil", Project: "evil-p"}
	for _, victim := range []struct {
		principal, method string
		at                cloud.Tenant
	}{
		{"admin", identity + "CreateUser", cloud.Tenant{}}, {"admin", identity + "RevokeTokens", cloud.Tenant{}}, {"admin", "/operator.v1.OperatorService/BanNode", cloud.Tenant{}},
		{"admin", identity + "SetQuota", evilP}, {"bob", identity + "BindRole", acme}, {"bob", identity + "DeleteProject", acme},
		{"carol", identity + "SetPassword", cloud.Tenant{}}, {"bob", vms + "DeleteVm", acme},
	} {
		s.act(t, &now, 1, victim.principal, victim.method, OK, victim.at)
	}
	s.act(t, &now, 1, "eve", vms+"GetVm", "PERMISSION_DENIED", acme)

	const n = 40
	for _, attack := range []struct {
		principal, method, outcome string
		at                         cloud.Tenant
	}{
		{"mallory", identity + "BindRole", OK, evilP}, {"mallory", identity + "CreateProject", OK, evil},
		{"TVAAAA", identity + "IssueToken", OK, evilP}, {"TVAAAA", identity + "RevokeToken", OK, cloud.Tenant{}}, {"mallory", identity + "SetPassword", OK, cloud.Tenant{}},
		{"mallory", vms + "UpdateVm", OK, evilP}, {"mallory", vms + "GetVm", "PERMISSION_DENIED", acme}, {"", "", "UNAUTHENTICATED", cloud.Tenant{}},
	} {
		s.act(t, &now, n, attack.principal, attack.method, attack.outcome, attack.at)
	}

	small := [classes]limit{}
	for c := range small {
		small[c] = limit{each: 10, cloud: 15, total: 30}
	}
	require.NoError(t, s.prune(t.Context(), small))
	left := map[string]int{}
	for _, r := range s.all(t) {
		left[r.Principal+" "+r.Method[strings.LastIndex(r.Method, "/")+1:]+" "+r.Outcome]++
	}
	require.Equal(t, map[string]int{
		"admin CreateUser OK": 1, "admin RevokeTokens OK": 1, "admin BanNode OK": 1, "admin SetQuota OK": 1, "bob BindRole OK": 1,
		"bob DeleteProject OK": 1, "carol SetPassword OK": 1, "bob DeleteVm OK": 1, "eve GetVm PERMISSION_DENIED": 1,
		"mallory CreateProject OK": 10, // the newest of BindRole and CreateProject together
		"TVAAAA RevokeToken OK":    10, "mallory SetPassword OK": 10, "mallory UpdateVm OK": 10, "mallory GetVm PERMISSION_DENIED": 10, "  UNAUTHENTICATED": 15,
	}, left)
}

// TestRecordsOfAnOrgHaveATotalLimit checks that the limit total applies to the records of all principals of one org
// together, so that an org with many principals cannot fill the disk.
func TestRecordsOfAnOrgHaveATotalLimit(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_000)
	s := newService(t, &now)
	s.act(t, &now, 1, "bob", "/identity.v1.IdentityService/BindRole", OK, cloud.Tenant{Org: "acme"})
	for i := range 8 {
		s.act(t, &now, 10, fmt.Sprint("mallory", i), "/identity.v1.IdentityService/BindRole", OK, cloud.Tenant{Org: "evil"})
	}
	require.NoError(t, s.prune(t.Context(), [classes]limit{policy: {each: 5, cloud: 5, total: 20}}))
	require.Len(t, s.all(t), 21)
}

// TestManyAccountsEvictNoOtherRecords checks that many service accounts with few records each do not evict other
// callers' records of tokens and refusals, and that responses to invitations, which belong to no org, do not evict the
// records of operators.
func TestManyAccountsEvictNoOtherRecords(t *testing.T) {
	const identity = "/identity.v1.IdentityService/"
	now := time.UnixMilli(1_800_000_000_000)
	s := newService(t, &now)
	s.act(t, &now, 1, "bob", identity+"IssueToken", OK, cloud.Tenant{Org: "acme"})
	s.act(t, &now, 1, "bob", identity+"BindRole", "PERMISSION_DENIED", cloud.Tenant{Org: "acme"})
	for i := range 10 {
		c := &cloud.Caller{
			User: cloud.UserID(fmt.Sprint("TV", i)), Proof: cloud.ProofAppCred, Scope: cloud.Tenant{Org: "evil", Project: "lair"},
			Method: identity + "RevokeToken",
		}
		for _, outcome := range []string{OK, "PERMISSION_DENIED"} {
			for range 5 {
				now = now.Add(time.Second)
				_, err := s.opts.Store.Update(t.Context(), func(tx *store.Tx) error {
					r := Of(c)
					r.Outcome = outcome
					put(tx, &r)
					return nil
				})
				require.NoError(t, err)
			}
		}
	}
	s.act(t, &now, 100, "mo", identity+"AcceptInvitation", OK, cloud.Tenant{})
	small := [classes]limit{}
	for c := range small {
		small[c] = limit{each: 10, cloud: 50, total: 20}
	}
	require.NoError(t, s.prune(t.Context(), small))
	left := map[string]int{}
	for _, r := range s.all(t) {
		left[r.Principal[:2]+" "+r.Method[strings.LastIndex(r.Method, "/")+1:]+" "+r.Outcome]++
	}
	require.Equal(t, map[string]int{
		"bo IssueToken OK": 1, "bo BindRole PERMISSION_DENIED": 1, "TV RevokeToken OK": 20, "TV RevokeToken PERMISSION_DENIED": 20,
		"mo AcceptInvitation OK": 10,
	}, left)
}

// TestPruneReadsOnlyWhenDue checks that Prune reads the records only if pruneAfter has passed, or the store has had
// pruneWrites updates, since it last read them.
func TestPruneReadsOnlyWhenDue(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_000)
	s := newService(t, &now)
	stale := func() {
		_, err := s.opts.Store.Update(t.Context(), func(tx *store.Tx) error {
			records.Put(tx, &Record{Outcome: OK}, newestFirst(now.UnixMilli()-Keep-1000), "old")
			return nil
		})
		require.NoError(t, err)
	}
	stale()
	require.NoError(t, s.Prune(t.Context()))
	require.Empty(t, s.all(t), "a new leader reads the records")
	stale()
	now = now.Add(PruneEvery)
	require.NoError(t, s.Prune(t.Context()))
	require.Len(t, s.all(t), 1, "Prune read the records five minutes ago and does not read them again")
	now = now.Add(pruneAfter)
	require.NoError(t, s.Prune(t.Context()))
	require.Empty(t, s.all(t))
	stale()
	s.prunedAt -= pruneWrites
	require.NoError(t, s.Prune(t.Context()))
	require.Empty(t, s.all(t), "Prune reads the records after that many updates")
}

// TestAuditedChangesAreCounted checks that the metrics count the audit records of committed changes, and not those of
// changes that fail.
func TestAuditedChangesAreCounted(t *testing.T) {
	var audited atomic.Uint64
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{KeyIndex: true, ValueCacheBytes: 1 << 20})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	records := store.New(store.Options{Engine: engine, Proposer: store.NewDirect(engine), PageKey: make([]byte, 32), Audited: &audited})
	s := New(Options{Store: records, Commands: leadertest.Single(), Log: slog.New(slog.DiscardHandler), Audited: &audited})
	ada := auth.With(t.Context(), &cloud.Caller{User: "ada", Proof: cloud.ProofPassword, Method: "/m"}, auth.RPC)
	change := func(err error) {
		_, got := records.Update(ada, func(tx *store.Tx) error {
			Stamp(ada, tx)
			return err
		})
		require.Equal(t, err, got)
	}
	change(nil)
	change(errors.New("refused"))
	change(nil)
	s.Done(&cloud.Caller{User: "ada", Proof: cloud.ProofPassword, Method: "/m"})
	require.InDelta(t, 3, metricstest.Values(t, s)["trivet_audit_records_total OK"], 0)
}

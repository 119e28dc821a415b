package identity

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestAudit checks that successful and refused calls are listed in the audit, that no record contains a password or
// token, and that an org's administrator can list only the records of the org.
func TestAudit(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	work.Go(func() { w.first.opts.Audit.Run(ctx) })
	w.user("ada", cloud.Binding{Role: cloud.OrgAdmin, Org: "acme"})
	_, proven, err := w.first.token(t.Context(), tokenRequest{User: "ada", Password: "guess guess", Address: "192.0.2.1:1"})
	require.NoError(t, err)
	require.False(t, proven)
	text := w.token(w.first, tokenRequest{User: "ada", Password: secret, Address: "192.0.2.1:1"})
	ada := w.as(w.first, text)
	auth.CallerOf(ada).RequestID = "11111111-1111-4111-8111-111111111111"
	r := &server{s: w.first}
	require.NoError(t, errOf(r.CreateProject(ada, &identityv1.CreateProjectRequest{Id: "web", OrgId: "acme"})))
	for range 3 {
		err := errOf(r.CreateUser(ada, &identityv1.CreateUserRequest{Id: "x"}))
		f, ok := fault.From(err)
		require.True(t, ok)
		auth.ReportFailure(w.first.opts.Audit, auth.CallerOf(ada), service+"CreateUser", f, "", "")
	}
	cancel()
	work.Wait()
	list := func(q *identityv1.ListAuditRecordsRequest) (out []*identityv1.AuditRecord) {
		for {
			q.PageSize = 2
			page, err := r.ListAuditRecords(w.admin(), q)
			require.NoError(t, err)
			out = append(out, page.GetRecords()...)
			if q.PageToken = page.GetNextPageToken(); q.PageToken == "" {
				return out
			}
		}
	}
	all := list(&identityv1.ListAuditRecordsRequest{})
	counts := map[string]int{}
	for i, a := range all {
		counts[fmt.Sprintf("%s %s %s", a.GetPrincipal(), a.GetMethod()[len(service):], a.GetOutcome())]++
		require.NotContains(t, a.String(), secret)
		require.NotContains(t, a.String(), "guess")
		require.NotContains(t, a.String(), text)
		if i > 0 {
			require.LessOrEqual(t, a.GetTime(), all[i-1].GetTime(), "newest first")
		}
	}
	require.Equal(t, map[string]int{
		"admin CreateUser OK": 1, "admin SetPassword OK": 1, "admin CreateOrg OK": 1, "admin BindRole OK": 1,
		" IssueToken UNAUTHENTICATED": 1, "ada IssueToken OK": 1, "ada CreateProject OK": 1, "ada CreateUser PERMISSION_DENIED": 1,
	}, counts)
	refused := list(&identityv1.ListAuditRecordsRequest{Outcome: audit.Refused, Principal: "ada"})
	require.Len(t, refused, 1)
	require.EqualValues(t, 2, refused[0].GetSuppressed(), "like ones are one record")
	made := list(&identityv1.ListAuditRecordsRequest{Method: "CreateProject"})
	require.Equal(t, "11111111-1111-4111-8111-111111111111", made[0].GetRequestId())
	require.Equal(t, []string{"acme", ""}, []string{made[0].GetOrgId(), made[0].GetProjectId()})
	w.wait(time.Hour)
	require.Empty(t, list(&identityv1.ListAuditRecordsRequest{Since: w.at.UnixMilli()}))
	require.Len(t, list(&identityv1.ListAuditRecordsRequest{Until: w.at.UnixMilli()}), len(all))

	own, err := r.ListAuditRecords(ada, &identityv1.ListAuditRecordsRequest{OrgId: "acme"})
	require.NoError(t, err)
	for _, a := range own.GetRecords() {
		require.Equal(t, "acme", a.GetOrgId())
	}
	require.NotEmpty(t, own.GetRecords())
	lair := cloud.Binding{Role: cloud.ProjectMember, Org: "evil", Project: "lair"}
	w.user("eve", lair)
	require.NotEmpty(t, list(&identityv1.ListAuditRecordsRequest{OrgId: "evil", ProjectId: "lair"}), "system:admin sees records of the project")
	for _, at := range []cloud.Tenant{{}, {Org: "evil"}, {Org: "evil", Project: "lair"}, {Project: "lair"}, {Project: "web"}} {
		err := errOf(r.ListAuditRecords(ada, &identityv1.ListAuditRecordsRequest{OrgId: string(at.Org), ProjectId: string(at.Project)}))
		require.True(t, fault.Is(err, fault.PermissionDenied), "the administrator of acme reads the audit of %q: %v", at, err)
	}
	foreign, err := r.ListAuditRecords(ada, &identityv1.ListAuditRecordsRequest{OrgId: "acme", ProjectId: "lair"})
	require.NoError(t, err)
	require.Empty(t, foreign.GetRecords(), "another org's project under the name of the own org")
	w.wait(91 * 24 * time.Hour)
	require.NoError(t, w.first.opts.Audit.Prune(t.Context()))
	require.Empty(t, list(&identityv1.ListAuditRecordsRequest{}))
}

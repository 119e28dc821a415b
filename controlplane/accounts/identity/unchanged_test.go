package identity

import (
	"testing"

	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestUnchangedIsNotRecorded checks that repeated calls that change nothing, such as giving a role again, write no log
// entry and no audit record.
func TestUnchangedIsNotRecorded(t *testing.T) {
	w := newWorld(t)
	w.user("mallory", cloud.Binding{Role: cloud.ProjectAdmin, Org: "evil", Project: "evil-p"})
	w.user("mo", cloud.Binding{Role: cloud.ProjectMember, Org: "evil", Project: "evil-p"})
	mallory := w.as(w.first, w.token(w.first, tokenRequest{User: "mallory", Password: secret, Org: "evil", Project: "evil-p", Address: "192.0.2.1:1"}))
	r := &server{s: w.first}
	viewer := oneOnWire(cloud.Binding{Role: cloud.ProjectViewer, Org: "evil", Project: "evil-p"})
	records := func(method string) int {
		page, err := r.ListAuditRecords(w.admin(), &identityv1.ListAuditRecordsRequest{Principal: "mallory", Method: method, PageSize: 1000})
		require.NoError(t, err)
		return len(page.GetRecords())
	}
	before := w.engine.Revision()
	for range 50 {
		require.NoError(t, errOf(r.BindRole(mallory, &identityv1.BindRoleRequest{UserId: "mo", Binding: viewer})))
	}
	require.Equal(t, before+1, w.engine.Revision())
	require.Equal(t, 1, records("BindRole"))
	for range 50 {
		require.NoError(t, errOf(r.UnbindRole(mallory, &identityv1.UnbindRoleRequest{UserId: "mo", Binding: viewer})))
	}
	require.Equal(t, before+2, w.engine.Revision())
	require.Equal(t, 1, records("UnbindRole"))
	seven := uint64(7)
	for range 3 {
		require.NoError(t, errOf(r.SetQuota(w.admin(), &identityv1.SetQuotaRequest{OrgId: "evil", ProjectId: "evil-p", Quota: &identityv1.Quota{Vms: &seven}})))
	}
	require.Equal(t, before+3, w.engine.Revision())
}

package main

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// vms requests the list of VMs from the REST API, with a token and with headers of the form name=value. It returns the
// HTTP status and the body.
func (h *testMember) vms(token string, headers ...string) (code int, body string) {
	r, err := http.NewRequestWithContext(h.callContext(), http.MethodGet, "http://"+h.config.Address(h.config.Ports.VM)+"/api/v1/vms", nil)
	require.NoError(h.t, err)
	r.Header.Set("Authorization", "Bearer "+token)
	for _, pair := range headers {
		key, value, _ := strings.Cut(pair, "=")
		r.Header.Set(key, value)
	}
	got, err := http.DefaultClient.Do(r)
	require.NoError(h.t, err)
	defer got.Body.Close()
	text, err := io.ReadAll(got.Body)
	require.NoError(h.t, err)
	return got.StatusCode, string(text)
}

// TestRolesFromAnotherOrgGiveNoAccess lets the administrator of one org give roles to users of another. This must not
// change what their tokens may do. Calls may name their tenant by metadata or headers, but only one in which the caller
// has a role.
func TestRolesFromAnotherOrgGiveNoAccess(t *testing.T) {
	h := startMember(t)
	who := identityv1.NewIdentityServiceClient(h.public)
	machines := vmv1.NewVmServiceClient(h.public)
	for _, p := range []cloud.Tenant{web, shop, lab} {
		if p != shop {
			mustCall(h, who.CreateOrg, &identityv1.CreateOrgRequest{Id: string(p.Org)})
		}
		mustCall(h, who.CreateProject, &identityv1.CreateProjectRequest{Id: string(p.Project), OrgId: string(p.Org)})
	}
	for _, p := range []testUser{{"ada", cloud.ProjectMember, web}, {"bob", cloud.OrgAdmin, web}, {"mallory", cloud.OrgAdmin, lab}} {
		mustCall(h, who.CreateUser, &identityv1.CreateUserRequest{Id: p.name})
		mustCall(h, who.SetPassword, &identityv1.SetPasswordRequest{UserId: p.name, Password: secret})
		mustCall(h, who.BindRole, &identityv1.BindRoleRequest{UserId: p.name, Binding: p.binding()})
	}
	token := func(user string) string { return h.restToken(user, secret, cloud.Tenant{}) }
	ada, bob, mallory := token("ada"), token("bob"), token("mallory")
	list := func(token string, at cloud.Tenant, pairs ...string) error {
		ctx := metadata.AppendToOutgoingContext(h.contextWithToken(token), pairs...)
		_, err := machines.ListVms(ctx, &vmv1.ListVmsRequest{OrgId: string(at.Org), ProjectId: string(at.Project)})
		return err
	}
	check := func() {
		t.Helper()
		code, body := h.vms(ada)
		require.Equal(t, http.StatusOK, code, body)
		require.NoError(t, list(ada, cloud.Tenant{}))
		code, body = h.vms(bob)
		require.Equal(t, http.StatusForbidden, code, body)
		require.Equal(t, codes.PermissionDenied, status.Code(list(bob, cloud.Tenant{})))
	}
	check()
	viewer := func(p cloud.Tenant) *identityv1.Binding {
		return &identityv1.Binding{Role: string(cloud.ProjectViewer), OrgId: string(p.Org), ProjectId: string(p.Project)}
	}
	for _, user := range []string{"ada", "bob", "nobody"} {
		got, err := who.BindRole(h.contextWithToken(mallory), &identityv1.BindRoleRequest{UserId: user, Binding: viewer(lab)})
		require.NoError(t, err)
		require.True(t, got.GetPending())
	}
	check()
	_, err := who.AcceptInvitation(h.contextWithToken(ada), &identityv1.AcceptInvitationRequest{Binding: viewer(lab)})
	require.NoError(t, err)
	mustCall(h, who.BindRole, &identityv1.BindRoleRequest{UserId: "ada", Binding: viewer(shop)})
	check()

	// With one token, each call may name its tenant: in the request, in its metadata, or in its headers.
	require.NoError(t, list(ada, lab))
	require.NoError(t, list(ada, cloud.Tenant{}, "trivet-project", "lab"))
	code, body := h.vms(ada, "Trivet-Project=shop")
	require.Equal(t, http.StatusOK, code, body)
	require.NoError(t, list(bob, cloud.Tenant{}, "trivet-project", "web"))
	code, body = h.vms(bob, "Trivet-Org=acme", "Trivet-Project=shop")
	require.Equal(t, http.StatusOK, code, body)
	_, err = who.DeleteProject(h.contextWithToken(bob), &identityv1.DeleteProjectRequest{Id: "shop", OrgId: "acme"})
	require.NoError(t, err, "the same token must allow the org:admin to delete a project")
	require.Equal(t, codes.InvalidArgument, status.Code(list(ada, cloud.Tenant{}, "trivet-project", "lab", "trivet-project", "web")))
	code, _ = h.vms(ada, "Trivet-Project=a/b")
	require.Equal(t, http.StatusBadRequest, code)

	// A project of another org must get the same response as one that does not exist.
	for _, ask := range []func(id string) string{
		func(id string) string { return fmt.Sprint(list(mallory, cloud.Tenant{Project: cloud.ProjectID(id)})) },
		func(id string) string { return fmt.Sprint(list(mallory, cloud.Tenant{}, "trivet-project", id)) },
		func(id string) string {
			return fmt.Sprint(list(h.restToken("mallory", secret, cloud.Tenant{Project: cloud.ProjectID(id)}), cloud.Tenant{}))
		},
		func(id string) string {
			code, body := h.vms(mallory, "Trivet-Project="+id)
			answer, _, _ := strings.Cut(body, `"meta"`)
			return fmt.Sprint(code, answer)
		},
		func(id string) string {
			_, err := who.IssueToken(h.callContext(), &identityv1.IssueTokenRequest{Username: "mallory", Password: secret, ProjectId: id})
			return fmt.Sprint(err)
		},
		func(id string) string {
			me, err := who.WhoAmI(h.contextWithToken(h.restToken("mallory", secret, cloud.Tenant{Project: cloud.ProjectID(id)})), &identityv1.WhoAmIRequest{})
			require.NoError(t, err)
			return me.GetOrgId() + "/" + me.GetProjectId()
		},
	} {
		theirs, none := ask("web"), ask("nix")
		require.NotContains(t, theirs, "acme")
		require.Equal(t, strings.ReplaceAll(none, "nix", "web"), theirs)
	}
	// Metadata must not turn a role in an org into one for the entire cloud.
	_, err = who.BindRole(metadata.AppendToOutgoingContext(h.contextWithToken(mallory), "trivet-org", "rival"),
		&identityv1.BindRoleRequest{UserId: "mallory", Binding: &identityv1.Binding{Role: string(cloud.SystemAdmin)}})
	require.Equal(t, codes.PermissionDenied, status.Code(err))
}

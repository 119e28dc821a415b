package rpc

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	guestv1 "github.com/trivet-cloud/trivet/protos/guest/v1"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// TestTarget checks that the description of a request for the audit contains its IDs and names, and no secret.
func TestTarget(t *testing.T) {
	for _, c := range []struct {
		in   any
		want string
	}{
		{&identityv1.IssueTokenRequest{Username: "ada", Password: "secret", ProjectId: "web"}, "project_id=web username=ada"},
		{&identityv1.SetPasswordRequest{UserId: "ada", Password: "secret"}, "user_id=ada"},
		{&identityv1.ExchangeTokenRequest{Provider: "corp", IdToken: "secret"}, ""},
		{&identityv1.RevokeTokenRequest{Token: "secret"}, ""},
		{&identityv1.BindRoleRequest{UserId: "ada", Binding: &identityv1.Binding{Role: "org:admin", OrgId: "acme"}}, "binding.org_id=acme binding.role=org:admin user_id=ada"},
		{&identityv1.SetQuotaRequest{ProjectId: "web", Quota: &identityv1.Quota{Vms: proto.Uint64(0)}}, "project_id=web quota.vms=0"},
		{&identityv1.CreateServiceAccountRequest{Name: "ci", Roles: []string{"project:viewer"}}, "name=ci role=project:viewer"},
		{&identityv1.UpdateServiceAccountRequest{Id: "ci", NewSecret: true, ExpiresAt: proto.Int64(0)}, "expires_at=0 id=ci new_secret=true"},
		{&guestv1.SetGuestPasswordRequest{VmId: "c", Username: "root", Password: "secret"}, "username=root vm_id=c"},
		{&guestv1.RunGuestCommandRequest{VmId: "c", Command: []string{"login", "secret"}, Stdin: []byte("secret")}, "vm_id=c"},
		{&vmv1.GetVmRequest{OrgId: "a", ProjectId: "b", VmId: "c"}, "org_id=a project_id=b vm_id=c"},
		{&vmv1.GetVmRequest{VmId: strings.Repeat("x", 300)}, "vm_id=" + strings.Repeat("x", 250) + "…"},
		{&operatorv1.RemoveMemberRequest{Id: 4, Force: true}, "id=4"},
		{nil, ""}, {7, ""},
	} {
		require.Equal(t, c.want, target(c.in))
	}
}

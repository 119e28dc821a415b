package main

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// user creates a user with a password and the role in b.
func (h *testMember) user(name string, b *identityv1.Binding) {
	h.t.Helper()
	who := identityv1.NewIdentityServiceClient(h.public)
	mustCall(h, who.CreateUser, &identityv1.CreateUserRequest{Id: name})
	mustCall(h, who.SetPassword, &identityv1.SetPasswordRequest{UserId: name, Password: secret})
	mustCall(h, who.BindRole, &identityv1.BindRoleRequest{UserId: name, Binding: b})
}

// as returns the context of a call by a user whose token is scoped to an org and, unless project is empty, to a
// project.
func (h *testMember) as(name, org, project string) context.Context {
	h.t.Helper()
	out, err := identityv1.NewIdentityServiceClient(h.public).IssueToken(h.callContext(),
		&identityv1.IssueTokenRequest{Username: name, Password: secret, OrgId: org, ProjectId: project})
	require.NoError(h.t, err)
	return h.contextWithToken(out.GetToken())
}

// TestOrgAdminCannotExceedTheOrgQuota lets the org:admin of one org attack a running member: with VMs in a project
// without a quota, with too many projects, with a project ID that another org needs, and with roles and wallets of a
// deleted project. Each attack must fail.
func TestOrgAdminCannotExceedTheOrgQuota(t *testing.T) {
	h := startMember(t)
	who, credit := identityv1.NewIdentityServiceClient(h.public), creditv1.NewCreditServiceClient(h.public)
	machines := vmv1.NewVmServiceClient(h.public)
	for _, org := range []string{"evil", "acme"} {
		mustCall(h, who.CreateOrg, &identityv1.CreateOrgRequest{Id: org})
	}
	h.user("mallory", &identityv1.Binding{Role: "org:admin", OrgId: "evil"})
	h.user("root", &identityv1.Binding{Role: "org:admin", OrgId: "acme"})
	h.joinHost()
	refused := func(err error, code codes.Code, says string) {
		t.Helper()
		require.Equal(t, code, status.Code(err), "%v", err)
		require.ErrorContains(t, err, says)
	}
	project := func(user, org, id string) error {
		_, err := who.CreateProject(h.as(user, org, ""), &identityv1.CreateProjectRequest{Id: id, OrgId: org})
		return err
	}
	create := func(name string) error {
		_, err := machines.CreateVm(h.as("mallory", "evil", "evil-unlimited"), &vmv1.CreateVmRequest{
			Name: name, OrgId: "evil", ProjectId: "evil-unlimited", Spec: &vmv1.VmSpec{
				Cpu: &vmv1.CpuSpec{Vcpus: 1}, Memory: &vmv1.MemorySpec{SizeMib: 512},
				Disks: []*vmv1.DiskSpec{{Id: "root", SizeGib: 1, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}}},
			},
		})
		return err
	}

	mustCall(h, who.SetQuota, &identityv1.SetQuotaRequest{OrgId: "evil", Quota: &identityv1.Quota{Vms: new(uint64(1)), Projects: new(uint64(2))}})
	require.NoError(t, project("mallory", "evil", "evil-unlimited"))
	// The scheduler learns only after a delay that the host is ready.
	h.waitFor(func() bool { return create("first") == nil })
	refused(create("second"), codes.ResourceExhausted, "the quota of org evil (shared by its projects) allows 1 vms")
	_, err := who.SetQuota(h.as("mallory", "evil", ""), &identityv1.SetQuotaRequest{OrgId: "evil", Quota: &identityv1.Quota{}})
	refused(err, codes.PermissionDenied, "system:admin")

	require.NoError(t, project("mallory", "evil", "acme-production"))
	refused(project("mallory", "evil", "evil-2"), codes.ResourceExhausted, "the quota of org evil (shared by its projects) allows 2 projects")
	_, err = who.DeleteProject(h.as("mallory", "evil", ""), &identityv1.DeleteProjectRequest{Id: "acme-production", OrgId: "evil"})
	require.NoError(t, err)
	refused(project("root", "acme", "acme-production"), codes.AlreadyExists, "reserved")

	// A project that does not exist must not get a wallet.
	_, err = credit.CreateWallet(h.adminContext(), &creditv1.CreateWalletRequest{OrgId: "acme", ProjectId: "nope"})
	refused(err, codes.NotFound, "no project nope")

	// A project p is deleted and created again. The roles and tokens that ada had in the first one must not apply to
	// the second one.
	require.NoError(t, project("root", "acme", "p"))
	h.user("ada", &identityv1.Binding{Role: "project:admin", OrgId: "acme", ProjectId: "p"})
	mustCall(h, credit.CreateWallet, &creditv1.CreateWalletRequest{OrgId: "acme", ProjectId: "p", InitialBalance: 100})
	wallet := &creditv1.GetWalletRequest{OrgId: "acme", ProjectId: "p"}
	// Tokens of three scopes. Contexts are made per call, because they have a timeout.
	scoped := mustCall(h, who.IssueToken, &identityv1.IssueTokenRequest{Username: "ada", Password: secret, OrgId: "acme", ProjectId: "p"}).GetToken()
	unscoped := mustCall(h, who.IssueToken, &identityv1.IssueTokenRequest{Username: "ada", Password: secret}).GetToken()
	rootScoped := mustCall(h, who.IssueToken, &identityv1.IssueTokenRequest{Username: "root", Password: secret, OrgId: "acme", ProjectId: "p"}).GetToken()
	for _, token := range []string{scoped, unscoped, rootScoped} {
		w, err := credit.GetWallet(h.contextWithToken(token), wallet)
		require.NoError(t, err)
		require.EqualValues(t, 100, w.GetBalance())
	}
	remove := &identityv1.DeleteProjectRequest{Id: "p", OrgId: "acme"}
	_, err = who.DeleteProject(h.as("root", "acme", ""), remove)
	refused(err, codes.FailedPrecondition, "has a wallet")
	mustCall(h, credit.CloseWallet, &creditv1.CloseWalletRequest{OrgId: "acme", ProjectId: "p"})
	_, err = who.DeleteProject(h.as("root", "acme", ""), remove)
	require.NoError(t, err)
	require.NoError(t, project("root", "acme", "p"))
	_, err = credit.GetWallet(h.adminContext(), wallet)
	refused(err, codes.NotFound, "Wallet not found")
	mustCall(h, credit.CreateWallet, &creditv1.CreateWalletRequest{OrgId: "acme", ProjectId: "p", InitialBalance: 7})
	for _, token := range []string{scoped, unscoped, rootScoped} {
		_, err := credit.GetWallet(h.contextWithToken(token), wallet)
		require.Equal(t, codes.NotFound, status.Code(err), "%v", err)
	}
	mustCall(h, who.BindRole, &identityv1.BindRoleRequest{UserId: "ada", Binding: &identityv1.Binding{Role: "project:admin", OrgId: "acme", ProjectId: "p"}})
	_, err = credit.GetWallet(h.contextWithToken(scoped), wallet)
	require.Equal(t, codes.NotFound, status.Code(err), "%v", err)
	w, err := credit.GetWallet(h.as("ada", "acme", "p"), wallet)
	require.NoError(t, err)
	require.EqualValues(t, 7, w.GetBalance())
	found := mustCall(h, credit.ListWallets, &creditv1.ListWalletsRequest{OrgId: "acme"}).GetWallets()
	require.Len(t, found, 2, "the wallet of the deleted project must be kept for audits")
	require.NotEqual(t, found[0].GetIncarnation(), found[1].GetIncarnation())
}

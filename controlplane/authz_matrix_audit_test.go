package main

import (
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// TestRefusalsAreAudited makes calls that are refused. The audit must have a record of each, with the method, the
// address, and the principal if the caller was authenticated, but without the caller's credentials.
func TestRefusalsAreAudited(t *testing.T) {
	h := startMember(t)
	h.createResources()
	tokens := &tokenCache{h, map[string]string{}}
	token := func(name string) string { return tokens.token(columnNamed(name), row{}) }
	machines, bills, who := vmv1.NewVmServiceClient(h.public), creditv1.NewCreditServiceClient(h.public), identityv1.NewIdentityServiceClient(h.public)
	ofWeb := &vmv1.GetVmRequest{OrgId: string(web.Org), ProjectId: string(web.Project), VmId: h.resources["vm"]}

	_, err := machines.DeleteVm(h.contextWithToken(token("project:viewer")), &vmv1.DeleteVmRequest{VmId: h.resources["vm"]})
	require.Equal(t, codes.PermissionDenied, status.Code(err))
	_, err = machines.GetVm(h.contextWithToken(token("other org")), ofWeb)
	require.Equal(t, codes.PermissionDenied, status.Code(err))
	_, err = machines.GetVm(h.contextWithToken(token("expired")), ofWeb)
	require.Equal(t, codes.Unauthenticated, status.Code(err))
	_, err = bills.TopUpWallet(h.contextWithToken(token("unproven")), &creditv1.TopUpWalletRequest{Amount: 5})
	require.Equal(t, codes.PermissionDenied, status.Code(err))
	_, err = who.IssueToken(h.callContext(), &identityv1.IssueTokenRequest{Username: "memb", Password: wrongSecret})
	require.Equal(t, codes.Unauthenticated, status.Code(err))
	got, _ := h.outcome(call{
		endpoint: endpoint{listener: boundListener{address: h.config.Address(h.config.Ports.VM)}, method: http.MethodGet}, path: "/api/v1/vms/" + h.resources["vm"],
	})
	require.Equal(t, "401 UNAUTHENTICATED", got)

	for _, want := range []*identityv1.AuditRecord{
		{Method: vms + "DeleteVm", Outcome: "PERMISSION_DENIED", Principal: "view", Proof: "password", Target: "vm_id=" + h.resources["vm"]},
		{Method: vms + "GetVm", Outcome: "PERMISSION_DENIED", Principal: "stranger", Proof: "password", Target: "vm_id=" + h.resources["vm"]},
		// The call with an expired token on gRPC and the one without a token on REST: their principal is unknown.
		{Method: vms + "GetVm", Outcome: "UNAUTHENTICATED"},
		{Method: credits + "TopUpWallet", Outcome: "PERMISSION_DENIED", Proof: "none", Target: "claims=sys"},
		// IssueToken has one record for all failed attempts within a second.
		{Method: identityService + "IssueToken", Outcome: "UNAUTHENTICATED", Proof: "none", Target: "username="},
	} {
		var found *identityv1.AuditRecord
		h.waitFor(func() bool {
			list := mustCall(h, who.ListAuditRecords, &identityv1.ListAuditRecordsRequest{Method: want.GetMethod(), Outcome: want.GetOutcome(), Principal: want.GetPrincipal()})
			for _, r := range list.GetRecords() {
				if strings.Contains(r.GetTarget(), want.GetTarget()) {
					found = r
				}
			}
			return found != nil
		})
		require.Equal(t, want.GetPrincipal(), found.GetPrincipal(), found)
		require.Equal(t, want.GetProof(), found.GetProof(), found)
		require.True(t, net.ParseIP(found.GetAddress()).IsLoopback(), found)
		require.NotEmpty(t, found.GetRequestId(), found)
		require.NotZero(t, found.GetTime(), found)
	}
	h.checkAuditHasNoSecrets(tokens)
}

// checkAuditHasNoSecrets fails the test if an audit record contains a password, a token or a key.
func (h *testMember) checkAuditHasNoSecrets(tokens *tokenCache) {
	secrets := []string{secret, wrongSecret, h.resources["key"], h.resources["ticket"], "eyJ"}
	for _, token := range tokens.tokens {
		if len(token) > 20 {
			secrets = append(secrets, token, token[strings.LastIndexByte(token, '.')+1:])
		}
	}
	who, page, records := identityv1.NewIdentityServiceClient(h.public), "", 0
	for {
		list := mustCall(h, who.ListAuditRecords, &identityv1.ListAuditRecordsRequest{PageSize: 1000, PageToken: page})
		for _, r := range list.GetRecords() {
			records++
			text, err := protojson.Marshal(r)
			require.NoError(h.t, err)
			for _, s := range secrets {
				if s != "" && strings.Contains(string(text), s) {
					h.t.Errorf("an audit record contains a secret: %s", text)
				}
			}
		}
		if page = list.GetNextPageToken(); page == "" {
			break
		}
	}
	require.NotZero(h.t, records)
	h.t.Logf("%d audit records, none with a secret", records)
}

// waitFor calls the function so every 10 ms until it returns true. It fails the test after startTime.
func (h *testMember) waitFor(so func() bool) {
	h.t.Helper()
	end := time.Now().Add(startTime)
	for !so() {
		require.True(h.t, time.Now().Before(end), "the expected event did not happen within %v", startTime)
		time.Sleep(10 * time.Millisecond)
	}
}

// TestAuditNamesObjects checks that the audit record of a change contains the name of the changed object, also after the
// object was renamed or deleted, and the user and the role of a new binding.
func TestAuditNamesObjects(t *testing.T) {
	h := startMember(t)
	h.createResources()
	org, project := string(web.Org), string(web.Project)
	machines, volumes := vmv1.NewVmServiceClient(h.public), vmv1.NewVolumeServiceClient(h.public)
	nets := networkv1.NewNetworkServiceClient(h.public)
	who := identityv1.NewIdentityServiceClient(h.public)

	mustCall(h, operatorv1.NewOperatorServiceClient(h.public).RenameVm, &operatorv1.RenameVmRequest{OrgId: org, ProjectId: project, VmId: h.resources["vm"], Name: "database"})
	mustCall(h, machines.DeleteVm, &vmv1.DeleteVmRequest{OrgId: org, ProjectId: project, VmId: h.resources["vm"], Force: true})
	vpc := mustCall(h, nets.CreateVpc, &networkv1.CreateVpcRequest{OrgId: org, ProjectId: project, Name: "prod", CidrBlock: "10.77.0.0/16"})
	subnet := mustCall(h, nets.CreateSubnet, &networkv1.CreateSubnetRequest{OrgId: org, ProjectId: project, Name: "front", VpcId: vpc.GetId(), CidrBlock: "10.77.1.0/24"})
	port := mustCall(h, nets.CreatePort, &networkv1.CreatePortRequest{OrgId: org, ProjectId: project, Name: "eth", SubnetId: subnet.GetId()})
	mustCall(h, nets.DeletePort, &networkv1.DeletePortRequest{OrgId: org, ProjectId: project, Id: port.GetId()})
	mustCall(h, nets.DeleteSubnet, &networkv1.DeleteSubnetRequest{OrgId: org, ProjectId: project, Id: subnet.GetId()})
	group := mustCall(h, nets.CreateSecurityGroup, &networkv1.CreateSecurityGroupRequest{OrgId: org, ProjectId: project, Name: "ssh"})
	mustCall(h, nets.AddSecurityGroupRule, &networkv1.AddSecurityGroupRuleRequest{OrgId: org, ProjectId: project, SecurityGroupId: group.GetId(),
		Rule: &networkv1.SecurityGroupRule{Direction: networkv1.Direction_DIRECTION_INGRESS, Protocol: "tcp", PortMin: 22, PortMax: 22}})
	mustCall(h, nets.DeleteSecurityGroup, &networkv1.DeleteSecurityGroupRequest{OrgId: org, ProjectId: project, Id: group.GetId()})
	mustCall(h, nets.DeleteVpc, &networkv1.DeleteVpcRequest{OrgId: org, ProjectId: project, Id: vpc.GetId()})
	mustCall(h, volumes.DeleteVolume, &vmv1.DeleteVolumeRequest{OrgId: org, ProjectId: project, VolumeId: h.resources["volume"]})
	mustCall(h, who.BindRole, &identityv1.BindRoleRequest{UserId: "spare", Binding: &identityv1.Binding{Role: "project:viewer", OrgId: org, ProjectId: project}})
	mustCall(h, who.DeleteServiceAccount, &identityv1.DeleteServiceAccountRequest{OrgId: org, ProjectId: project, Id: h.resources["account"]})

	for method, want := range map[string]string{
		"CreateVm":             "name=db ",
		"RenameVm":             "object=db name=database ",
		"DeleteVm":             "object=database ",
		"CreateSubnet":         "name=front ",
		"CreatePort":           "name=eth ",
		"DeletePort":           "object=eth ",
		"DeleteSubnet":         "object=front ",
		"AddSecurityGroupRule": "object=ssh ",
		"DeleteSecurityGroup":  "object=ssh ",
		"DeleteVpc":            "object=prod ",
		"DeleteVolume":         "object=data ",
		"DeleteServiceAccount": "object=" + serviceAccount.name + " ",
	} {
		list := mustCall(h, who.ListAuditRecords, &identityv1.ListAuditRecordsRequest{Method: method, Outcome: "OK"})
		require.NotEmpty(t, list.GetRecords(), method)
		require.True(t, strings.HasPrefix(list.GetRecords()[0].GetTarget(), want), "%s: %q", method, list.GetRecords()[0].GetTarget())
	}
	list := mustCall(h, who.ListAuditRecords, &identityv1.ListAuditRecordsRequest{Method: "BindRole", Outcome: "OK"})
	require.Contains(t, list.GetRecords()[0].GetTarget(), "binding.role=project:viewer ")
	require.Contains(t, list.GetRecords()[0].GetTarget(), "user_id=spare")
}

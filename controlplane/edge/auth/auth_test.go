package auth

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func caller(proof cloud.Proof, scope cloud.Tenant, bindings ...cloud.Binding) *cloud.Caller {
	return &cloud.Caller{User: "u", Proof: proof, Scope: scope, Bindings: bindings}
}

func in(role cloud.Role, org cloud.OrgID, project cloud.ProjectID) cloud.Binding {
	return cloud.Binding{Role: role, Org: org, Project: project}
}

// TestAdmit checks for each case which tenant Admit returns, or with which error it refuses the call.
func TestAdmit(t *testing.T) {
	const get, create, list, cordon = vms + "GetVm", vms + "CreateVm", images + "ListImages", nodes + "CordonNode"
	const wallet, topUp, reserve = credits + "GetWallet", credits + "TopUpWallet", credits + "CreateReservation"
	op := cloud.Tenant{Org: "o", Project: "p"}
	biller := caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.BillingAdmin, "", ""))
	billerInP := caller(cloud.ProofPassword, op, in(cloud.BillingAdmin, "", ""))
	member := caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.ProjectMember, "o", "p"))
	viewer := caller(cloud.ProofPassword, op, in(cloud.ProjectViewer, "o", "p"))
	two := caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.ProjectMember, "o", "p"), in(cloud.ProjectViewer, "o", "q"))
	orgAdmin := caller(cloud.ProofPassword, cloud.Tenant{Org: "o", Project: "q"}, in(cloud.OrgAdmin, "o", ""))
	foreign := caller(cloud.ProofPassword, op, in(cloud.ProjectMember, "x", "p"))
	admin := caller(cloud.ProofHostKey, cloud.Tenant{}, in(cloud.SystemAdmin, "", ""))
	adminInP := caller(cloud.ProofHostKey, op, in(cloud.SystemAdmin, "", ""))
	for _, c := range []struct {
		name         string
		who          *cloud.Caller
		edge         Edge
		method       Method
		org, project string
		tenant       cloud.Tenant
		kind         fault.Kind
		says         string
	}{
		{name: "no token", method: get, kind: fault.Unauthenticated, says: "Bearer"},
		{name: "unauthenticated token", who: caller(cloud.ProofNone, op, in(cloud.SystemAdmin, "", "")), method: get, kind: fault.PermissionDenied, says: "is unauthenticated"},
		{name: "token without a proof", who: caller("", op, in(cloud.SystemAdmin, "", "")), method: get, kind: fault.PermissionDenied, says: "is unauthenticated"},
		{name: "no role", who: caller(cloud.ProofPassword, cloud.Tenant{}), method: get, kind: fault.PermissionDenied, says: "no role in any project"},
		{name: "a host", who: &cloud.Caller{Node: "n"}, method: get, kind: fault.PermissionDenied, says: "not for hosts"},
		{name: "role in one project, request names none", who: member, method: create, tenant: op},
		{name: "role in one project, request names it", who: member, method: create, org: "o", project: "p", tenant: op},
		{name: "request names another project", who: member, method: create, org: "o", project: "q", kind: fault.NotFound, says: "no project q"},
		{name: "request names another org", who: member, method: create, org: "x", kind: fault.NotFound, says: "no org x"},
		{name: "roles in two projects, request names none", who: two, method: get, kind: fault.PermissionDenied, says: "o/p, o/q"},
		{name: "roles in two projects, request names one", who: two, method: get, org: "o", project: "p", tenant: op},
		{name: "viewer reads", who: viewer, method: get, tenant: op},
		{name: "viewer writes", who: viewer, method: create, kind: fault.PermissionDenied, says: "may not CreateVm"},
		{name: "org admin in any project", who: orgAdmin, method: create, tenant: cloud.Tenant{Org: "o", Project: "q"}},
		{name: "role in another org's project", who: foreign, method: get, kind: fault.NotFound, says: "no project p"},
		{name: "images of the org of the caller's project", who: member, method: list, org: "o", tenant: cloud.Tenant{Org: "o"}},
		{name: "images of another org", who: member, method: list, org: "x", kind: fault.NotFound},
		{name: "admin without project, RPC", who: admin, method: get, org: "o", kind: fault.InvalidArgument, says: "project_id"},
		{name: "admin without org, RPC", who: admin, method: list, kind: fault.InvalidArgument, says: "org_id"},
		{name: "admin with project, RPC", who: admin, method: get, org: "o", project: "p", tenant: op},
		{name: "admin without project, REST", who: admin, edge: REST, method: get, kind: fault.PermissionDenied, says: "token with org_id and project_id"},
		{name: "admin with a project's token, REST", who: adminInP, edge: REST, method: get, tenant: op},
		{name: "admin with a project's token, another project", who: adminInP, method: get, org: "o", project: "q", kind: fault.PermissionDenied},
		{name: "cordon by admin", who: admin, method: cordon},
		{name: "cordon by member", who: member, method: cordon, kind: fault.PermissionDenied},
		{name: "nodes by member", who: member, method: nodes + "ListNodes"},
		{name: "images, two projects of one org", who: two, method: list, tenant: cloud.Tenant{Org: "o"}},
		{name: "images, two orgs", who: caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.OrgAdmin, "o", ""), in(cloud.ProjectViewer, "x", "p")), method: list, kind: fault.PermissionDenied, says: "one of o, x"},
		{name: "images by an org admin", who: caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.OrgAdmin, "o", "")), method: list, tenant: cloud.Tenant{Org: "o"}},
		{name: "images with an org's token", who: caller(cloud.ProofPassword, cloud.Tenant{Org: "o"}, in(cloud.ProjectMember, "o", "p"), in(cloud.ProjectMember, "x", "y")), method: list, tenant: cloud.Tenant{Org: "o"}},
		{name: "images with another org's token", who: caller(cloud.ProofPassword, cloud.Tenant{Org: "x"}, in(cloud.ProjectMember, "o", "p")), method: list, kind: fault.NotFound, says: "no org x"},
		{name: "images by a caller without roles", who: caller(cloud.ProofPassword, cloud.Tenant{}), method: list, kind: fault.PermissionDenied, says: "no role in any org"},
		{name: "org admin without a project", who: caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.OrgAdmin, "o", "")), method: get, kind: fault.PermissionDenied, says: "no role in any project"},
		{name: "a project that does not exist", who: caller(cloud.ProofPassword, cloud.Tenant{Project: "p"}, in(cloud.OrgAdmin, "o", "")), method: get, kind: fault.NotFound, says: "no project p"},
		{name: "a project that does not exist, images", who: caller(cloud.ProofHostKey, cloud.Tenant{Project: "p"}, in(cloud.SystemAdmin, "", "")), method: list, kind: fault.NotFound, says: "no project p"},
		{name: "a token of a project cannot cordon nodes", who: adminInP, method: cordon, kind: fault.PermissionDenied, says: "limited to o/p"},
		{name: "a token of a project that does not exist cannot cordon nodes", who: caller(cloud.ProofHostKey, cloud.Tenant{Project: "p"}, in(cloud.SystemAdmin, "", "")), method: cordon, kind: fault.PermissionDenied, says: "limited to /p"},
		{name: "a service account cannot create a service account", who: caller(cloud.ProofAppCred, op, in(cloud.ProjectAdmin, "o", "p")), method: identity + "CreateServiceAccount", kind: fault.PermissionDenied, says: "would outlive"},
		{name: "a service account cannot change a service account", who: caller(cloud.ProofAppCred, op, in(cloud.ProjectAdmin, "o", "p")), method: identity + "UpdateServiceAccount", kind: fault.PermissionDenied, says: "would outlive"},
		{name: "role that may delete images, but in another project than the token's", who: caller(cloud.ProofPassword, op, in(cloud.ProjectViewer, "o", "p"), in(cloud.ProjectMember, "o", "q")), method: images + "DeleteImage", kind: fault.PermissionDenied, says: "may not DeleteImage"},
		{name: "admin with an org's token", who: caller(cloud.ProofHostKey, cloud.Tenant{Org: "o"}, in(cloud.SystemAdmin, "", "")), method: get, project: "p", tenant: op},
		{name: "admin with an org's token, another org", who: caller(cloud.ProofHostKey, cloud.Tenant{Org: "o"}, in(cloud.SystemAdmin, "", "")), method: get, org: "x", project: "p", kind: fault.PermissionDenied, says: "limited to org o"},
		{name: "method of administrators, by member", who: member, method: operators + "ClusterStatus", kind: fault.PermissionDenied, says: "[system:admin]"},
		{name: "under --dev, token of a project without a role", who: caller(cloud.ProofDev, cloud.Tenant{Org: "x", Project: "y"}, in(cloud.ProjectAdmin, "o", "p")), method: get, kind: fault.NotFound, says: "no project y"},
		{name: "credit: billing names the project, REST", who: biller, edge: REST, method: topUp, project: "p", tenant: cloud.Tenant{Project: "p"}},
		{name: "credit: billing names no project", who: biller, method: topUp, kind: fault.InvalidArgument, says: "project_id"},
		{name: "credit: billing reads", who: biller, method: wallet, org: "o", project: "p", tenant: op},
		{name: "credit: billing:admin cannot reserve", who: biller, method: reserve, project: "p", kind: fault.NotFound, says: "no project p"},
		{name: "credit: billing:admin cannot read VMs", who: biller, method: get, org: "o", project: "p", kind: fault.NotFound, says: "no project p"},
		{name: "credit: billing within the token's project", who: billerInP, method: topUp, tenant: op},
		{name: "credit: billing beyond the token's project", who: billerInP, method: topUp, project: "q", kind: fault.PermissionDenied, says: "limited to o/p"},
		{name: "credit: billing with an org's token, another org", who: caller(cloud.ProofPassword, cloud.Tenant{Org: "o"}, in(cloud.BillingAdmin, "", "")), method: topUp, org: "x", project: "p", kind: fault.PermissionDenied, says: "limited to org o"},
		{name: "credit: a member with billing reserves in the own project", who: caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.BillingAdmin, "", ""), in(cloud.ProjectMember, "o", "p")), method: reserve, project: "p", tenant: op},
		{name: "credit: admin names the project, REST", who: admin, edge: REST, method: wallet, project: "p", tenant: cloud.Tenant{Project: "p"}},
		{name: "credit: member reserves", who: member, edge: REST, method: reserve, project: "p", tenant: op},
		{name: "credit: member tops up", who: member, method: topUp, kind: fault.PermissionDenied, says: "[billing:admin]"},
		{name: "credit: another project's wallet", who: member, edge: REST, method: wallet, project: "q", kind: fault.PermissionDenied, says: "no project q"},
		{name: "credit: viewer reads", who: viewer, method: wallet, tenant: op},
		{name: "credit: viewer reserves", who: viewer, method: reserve, kind: fault.PermissionDenied, says: "may not"},
		{name: "credit: billing with an unauthenticated token", who: caller(cloud.ProofNone, op, in(cloud.BillingAdmin, "", "")), method: topUp, project: "p", kind: fault.PermissionDenied, says: "is unauthenticated"},
		{name: "unnamed org, org admin of one", who: caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.OrgAdmin, "o", "")), method: identity + "CreateProject", kind: fault.PermissionDenied, says: "u may not CreateProject in the whole cloud: name the org with org_id o"},
		{name: "unnamed org, org admin of two", who: caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.OrgAdmin, "x", ""), in(cloud.OrgAdmin, "o", "")), method: identity + "ListGroups", kind: fault.PermissionDenied, says: "name one of o, x with org_id"},
		{name: "unnamed org, project admin", who: caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.ProjectAdmin, "o", "p")), method: identity + "ListBindings", kind: fault.PermissionDenied, says: "name the project with org_id o and project_id p"},
		{name: "unnamed org, org admin names a project", who: caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.OrgAdmin, "o", "")), method: identity + "ListAuditRecords", project: "p", kind: fault.PermissionDenied, says: "name the org with org_id o"},
		{name: "unnamed org, project admin where only an org admin may call", who: caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.ProjectAdmin, "o", "p")), method: identity + "ListAuditRecords", project: "p", kind: fault.PermissionDenied, says: "[org:admin] in project p"},
		{name: "unnamed org, a project's token", who: caller(cloud.ProofPassword, op, in(cloud.ProjectAdmin, "o", "p")), method: identity + "ListBindings", kind: fault.PermissionDenied, says: "name the project with org_id o and project_id p"},
		{name: "unnamed org, an org's token", who: caller(cloud.ProofPassword, cloud.Tenant{Org: "o"}, in(cloud.OrgAdmin, "o", ""), in(cloud.OrgAdmin, "x", "")), method: identity + "ListBindings", kind: fault.PermissionDenied, says: "name the org with org_id o"},
		{name: "a project's token of an org admin", who: orgAdmin, method: identity + "CreateProject", org: "o", kind: fault.PermissionDenied, says: "limited to o/q and cannot be used for o"},
		{name: "a project's token of a member on an operator's call", who: caller(cloud.ProofPassword, op, in(cloud.ProjectMember, "o", "p")), method: operators + "ClusterStatus", kind: fault.PermissionDenied, says: "needs one of the roles [system:admin]"},
		{name: "unknown method", who: admin, method: "/x/Y", kind: fault.PermissionDenied, says: "not open"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx := t.Context()
			if c.who != nil {
				ctx = With(ctx, c.who, c.edge)
			}
			tenant, err := Admit(ctx, c.method, c.org, c.project)
			if c.kind == fault.Internal {
				require.NoError(t, err)
				require.Equal(t, c.tenant, tenant)
				return
			}
			require.True(t, fault.Is(err, c.kind), "%v", err)
			require.ErrorContains(t, err, c.says)
			require.Zero(t, tenant)
		})
	}
}

func TestBearer(t *testing.T) {
	for header, want := range map[string]string{"Bearer abc": "abc", "bearer  abc ": "abc", "": "", "Basic abc": "", "Bearer": "", "Bearer ": ""} {
		token, err := Bearer(header)
		require.Equal(t, want, token, header)
		require.Equal(t, want == "", fault.Is(err, fault.Unauthenticated), header)
	}
}

// TestRolesGrantOnlyListedMethods calls Admit for every role and method. A role must be admitted only to the methods
// whose rule lists it, and methods without roles must admit only system:admin.
func TestRolesGrantOnlyListedMethods(t *testing.T) {
	op := cloud.Tenant{Org: "o", Project: "p"}
	binding := map[cloud.Role]cloud.Binding{
		cloud.SystemAdmin: in(cloud.SystemAdmin, "", ""), cloud.OrgAdmin: in(cloud.OrgAdmin, "o", ""), cloud.BillingAdmin: in(cloud.BillingAdmin, "", ""),
	}
	writes := 0
	for method, rule := range rules {
		for _, role := range cloud.Roles() {
			b, ok := binding[role]
			if !ok {
				b = in(role, "o", "p")
			}
			var at cloud.Tenant
			scope := op
			switch rule.Scope {
			case OfPlace:
				at = op
			case Nowhere:
				scope = cloud.Tenant{}
			}
			_, err := Admit(With(t.Context(), caller(cloud.ProofPassword, scope, b), RPC), method, string(at.Org), string(at.Project))
			want := role == cloud.SystemAdmin || slices.Contains(rule.Roles, role) || slices.Contains(rule.Roles, anyProven[0])
			require.Equal(t, want, err == nil, "%s %s: %v", role, method, err)
			if role == cloud.ProjectViewer && err == nil {
				verb := method.verb()
				own := []string{"SetPassword", "RevokeToken", "RevokeTokens", "AcceptInvitation", "DeclineInvitation"}
				require.True(t, method.Reads() || slices.Contains(own, verb), "a viewer may %s", verb)
			}
			if role == cloud.ProjectMember && err == nil {
				writes++
			}
		}
	}
	require.Greater(t, writes, 20)
}

func TestIdempotencyKeys(t *testing.T) {
	for key, ok := range map[string]bool{
		"": true, "0190": true, "a b~": true, "a\nb": false, "é": false, "\x7f": false, "a\xff": false,
		strings.Repeat("k", 255): true, strings.Repeat("k", 256): false,
	} {
		require.Equal(t, ok, CheckIdempotencyKey("k", key) == nil, "%q", key)
	}
}

// TestReadmit checks that an admitted call is authorized again with the present roles of its caller. For a call that
// was not admitted, Readmit must return nil.
func TestReadmit(t *testing.T) {
	now := func(bindings ...cloud.Binding) *cloud.Caller {
		return caller(cloud.ProofPassword, cloud.Tenant{}, bindings...)
	}
	member := in(cloud.ProjectMember, "o", "p")
	ctx := With(t.Context(), now(member), RPC)
	require.NoError(t, Readmit(ctx, now()), "Readmit must allow a call that was not admitted")
	_, err := Admit(ctx, vms+"WatchVm", "", "")
	require.NoError(t, err)
	require.NoError(t, Readmit(ctx, now(member)))
	require.NoError(t, Readmit(ctx, now(member, in(cloud.ProjectMember, "o", "q"))), "a further role must not change the tenant of an admitted call")
	for name, c := range map[string]*cloud.Caller{
		"no role": now(), "role in another project only": now(in(cloud.ProjectMember, "o", "q")), "unauthenticated": caller(cloud.ProofNone, cloud.Tenant{}, member),
	} {
		require.True(t, fault.Is(Readmit(ctx, c), fault.PermissionDenied), name)
	}
}

// countingAuditor is an Auditor that counts the calls of its two methods, and keeps the message of the last failed call.
type countingAuditor struct {
	done, failed int
	message      string
}

func (a *countingAuditor) Done(*cloud.Caller) { a.done++ }
func (a *countingAuditor) Failed(_ *cloud.Caller, _, message string) {
	a.failed++
	a.message = message
}

// TestCallsAreReportedToTheAuditor checks which calls reach the auditor: successful calls that write no record, failed
// changes, and refused reads, but no others.
func TestCallsAreReportedToTheAuditor(t *testing.T) {
	c := caller(cloud.ProofPassword, cloud.Tenant{})
	for _, x := range []struct {
		method Method
		kind   fault.Kind
		want   countingAuditor
	}{
		{operators + "BackupCluster", 0, countingAuditor{done: 1}}, {operators + "TransferLeader", 0, countingAuditor{done: 1}}, {vms + "CreateVm", 0, countingAuditor{}},
		{vms + "CreateVm", fault.ResourceExhausted, countingAuditor{failed: 1, message: "no"}}, {vms + "GetVm", fault.NotFound, countingAuditor{}},
		{vms + "GetVm", fault.PermissionDenied, countingAuditor{failed: 1, message: "no"}}, {vms + "GetVm", fault.Unauthenticated, countingAuditor{failed: 1, message: "no"}},
		{guests + "SetGuestPassword", 0, countingAuditor{done: 1}}, {guests + "RunGuestCommand", 0, countingAuditor{done: 1}},
	} {
		var a countingAuditor
		if x.kind == 0 {
			ReportSuccess(&a, c, x.method)
		} else {
			ReportFailure(&a, c, x.method, fault.New(x.kind, "no"), "", "")
		}
		require.Equal(t, x.want, a, x.method)
	}
}

// TestEndOfRecordedCallIsNotReported checks that a call that the audit has recorded as successful is not recorded again
// when it ends with an error, whatever the error is.
func TestEndOfRecordedCallIsNotReported(t *testing.T) {
	const attach = "/console.v1.ConsoleService/AttachConsole"
	for _, kind := range []fault.Kind{fault.Unavailable, fault.Canceled, fault.Unauthenticated} {
		c := caller(cloud.ProofPassword, cloud.Tenant{})
		var a countingAuditor
		ReportFailure(&a, c, attach, fault.New(kind, "no"), "", "")
		require.Equal(t, 1, a.failed)
		c.Recorded = true
		ReportFailure(&a, c, attach, fault.New(kind, "no"), "", "")
		require.Equal(t, 1, a.failed)
	}
}

// TestAuditQuotesNoGuest checks that the text of a guest, which can repeat a password, does not reach the audit.
func TestAuditQuotesNoGuest(t *testing.T) {
	var a countingAuditor
	f := fault.New(fault.FailedPrecondition, "the guest agent refused the request: secret").WithReason(GuestCallFailed)
	ReportFailure(&a, caller(cloud.ProofPassword, cloud.Tenant{}), guests+"SetGuestPassword", f, "", "")
	require.Equal(t, countingAuditor{failed: 1, message: GuestCallFailed}, a)
}

// TestAdmitTwice calls Admit several times for one call. The policy must be evaluated again only if the method, the
// tenant or the caller's roles differ from those that were allowed. A refusal must not be cached.
func TestAdmitTwice(t *testing.T) {
	const get, create = vms + "GetVm", vms + "CreateVm"
	c := caller(cloud.ProofPassword, cloud.Tenant{}, in(cloud.ProjectMember, "o", "p"), in(cloud.ProjectMember, "o", "q"), in(cloud.ProjectViewer, "x", "p"))
	ctx := With(t.Context(), c, REST)
	for _, step := range []struct {
		method       Method
		org, project string
		allowed      bool
		evaluations  int64
	}{
		{create, "o", "p", true, 1},
		{create, "o", "p", true, 0},
		{get, "o", "p", true, 1},
		{get, "o", "q", true, 1},
		{create, "x", "p", false, 1},
		{create, "x", "p", false, 1},
		{get, "o", "q", true, 0},
	} {
		before := Evaluations()
		_, err := Admit(ctx, step.method, step.org, step.project)
		require.Equal(t, step.allowed, err == nil, "%s in %s/%s: %v", step.method, step.org, step.project, err)
		require.Equal(t, step.evaluations, Evaluations()-before, "%s in %s/%s", step.method, step.org, step.project)
	}

	// The caller's roles have changed, so the same call must be evaluated again.
	_, err := Admit(ctx, create, "o", "p")
	require.NoError(t, err)
	c.Bindings = []cloud.Binding{in(cloud.ProjectViewer, "o", "p")}
	_, err = Admit(ctx, create, "o", "p")
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
}

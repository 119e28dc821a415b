package auth

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// places lists tenants for the tests: the entire cloud, two orgs, and projects in them.
var places = []cloud.Tenant{{}, {Org: "o"}, {Org: "o", Project: "p"}, {Org: "o", Project: "q"}, {Org: "x"}, {Org: "x", Project: "y"}}

// bindings returns a binding for each role and each tenant in places in which the role can be given.
func bindings() (all []cloud.Binding) {
	for _, role := range cloud.Roles() {
		for _, at := range places {
			if b := (cloud.Binding{Role: role, Org: at.Org, Project: at.Project}); b.Check() == nil {
				all = append(all, b)
			}
		}
	}
	return all
}

// allCallers returns callers with each proof, users and hosts, with no role or with each binding, and users with each
// pair of bindings.
func allCallers() (all []*cloud.Caller) {
	held := [][]cloud.Binding{nil}
	for _, b := range bindings() {
		held = append(held, []cloud.Binding{b})
	}
	proofs := []cloud.Proof{"", cloud.ProofNone, cloud.ProofPassword, cloud.ProofAppCred, cloud.ProofOIDC, cloud.ProofHostKey, cloud.ProofDev}
	for _, proof := range proofs {
		for _, h := range held {
			all = append(all, &cloud.Caller{User: "u", Proof: proof, Bindings: h}, &cloud.Caller{Node: "n", Proof: proof, Bindings: h})
		}
	}
	for i, a := range bindings() {
		for _, b := range bindings()[:i] {
			all = append(all, &cloud.Caller{User: "u", Proof: cloud.ProofPassword, Bindings: []cloud.Binding{a, b}})
		}
	}
	return all
}

// allowed decides by the authorization table whether c may call m in the tenant at. It is independent of what it
// checks: it uses neither the Cedar policy nor the role functions of package cloud.
func allowed(table map[Method]Rule, c *cloud.Caller, m Method, at cloud.Tenant) bool {
	lasting := m == identity+"BindRole" || m == identity+"AcceptInvitation" || m == identity+"CreateServiceAccount" ||
		m == identity+"UpdateServiceAccount"
	if lasting && (c.Proof == cloud.ProofAppCred || c.Proof == cloud.ProofDev) {
		return false
	}
	rule, ruled := table[m]
	if c.Node != "" || c.Proof == "" || c.Proof == cloud.ProofNone {
		return false
	}
	for _, b := range c.Bindings {
		if b.Role == cloud.SystemAdmin {
			return true
		}
		if !ruled || !slices.Contains(rule.Roles, b.Role) {
			continue
		}
		switch b.Role {
		case cloud.BillingAdmin:
			return true
		case cloud.OrgAdmin:
			if b.Org == at.Org {
				return true
			}
		default:
			if b.Org == at.Org && (b.Project == at.Project || rule.Scope == OfOrg) {
				return true
			}
		}
	}
	return ruled && slices.Contains(rule.Roles, AnyProven)
}

// compare compares the decisions of a policy engine with those of allowed, for each method, tenant and caller. It stops
// at the first difference and describes it in wrong. decisions is the number of comparisons.
func compare(j policyEngine, table map[Method]Rule, callers []*cloud.Caller) (decisions int, wrong string) {
	methods := append(slices.Sorted(maps.Keys(table)), "/nowhere.v1.Nothing/Ask")
	for _, m := range methods {
		for _, at := range places {
			if table[m].Scope == OfOrg {
				at.Project = ""
			}
			for _, c := range callers {
				decisions++
				if got, want := j.permits(c, m, at, table[m].rolesAt(c, at)), allowed(table, c, m, at); got != want {
					return decisions, fmt.Sprintf("%s in %q by %s with proof %q and %v: %t", m, at.String(), c.Name(), c.Proof, c.Bindings, got)
				}
			}
		}
	}
	return decisions, ""
}

// TestPolicyMatchesTable checks that the Cedar policy decides as the table does, for every method, tenant and kind of
// caller.
func TestPolicyMatchesTable(t *testing.T) {
	decisions, wrong := compare(defaultPolicy, rules, allCallers())
	require.Empty(t, wrong)
	t.Logf("%d decisions", decisions)
}

// TestWrongPolicyIsNoticed changes the policy, or the table that it is evaluated with, in one place. compare must find
// a difference for each change.
func TestWrongPolicyIsNoticed(t *testing.T) {
	callers := allCallers()
	const never = `forbid (principal, action, resource) when { false };`
	for name, change := range map[string][2]string{
		"service accounts may create service accounts":                      {`context.proof == "appcred" || `, ""},
		"unauthenticated callers are not refused":                           {`forbid (principal, action, resource) unless { context.proven };`, never},
		"authenticated callers are refused instead of unauthenticated ones": {`unless { context.proven }`, `when { context.proven }`},
		"hosts are not refused":                                             {`forbid (principal is Host, action, resource);`, never},
		"system:admin has no rights":                                        {`permit (principal, action, resource) when { context.roles.contains("system:admin") };`, never},
		"org:admin has the rights of system:admin":                          {`context.roles.contains("system:admin")`, `context.roles.contains("org:admin")`},
		"every caller has the rights of system:admin":                       {`when { context.roles.contains("system:admin") }`, ``},
		"project:viewer has the rights of project:member":                   {`permit (principal, action in Grants::"project:member", resource) when { context.roles.contains("project:member") };`, `permit (principal, action in Grants::"project:member", resource) when { context.roles.contains("project:viewer") };`},
		"every caller has the rights of project:viewer":                     {`resource) when { context.roles.contains("project:viewer") };`, `resource);`},
		"billing:admin has no rights":                                       {`permit (principal, action in Grants::"billing:admin", resource) when { context.roles.contains("billing:admin") };`, never},
		"project:member has no rights":                                      {`context.roles.contains("project:member")`, `context.roles.contains("project:owner")`},
		"an authenticated caller without a role has no rights":              {`permit (principal, action in Grants::"anybody proven", resource);`, never},
		"every authenticated caller has all rights":                         {`permit (principal, action in Grants::"anybody proven", resource);`, `permit (principal, action, resource);`},
	} {
		require.Equal(t, 1, bytes.Count(policyText, []byte(change[0])), name)
		j, err := newPolicyEngine(bytes.Replace(policyText, []byte(change[0]), []byte(change[1]), 1), rules)
		require.NoError(t, err, name)
		_, wrong := compare(j, rules, callers)
		require.NotEmpty(t, wrong, name)
	}
	for m, rule := range rules {
		if slices.Contains(rule.Roles, AnyProven) {
			continue
		}
		for _, role := range cloud.Roles()[1:] {
			other := Rule{rule.Scope, append(slices.Clone(rule.Roles), role)}
			if slices.Contains(rule.Roles, role) {
				other.Roles = slices.DeleteFunc(other.Roles, func(r cloud.Role) bool { return r == role })
			}
			held := slices.DeleteFunc(bindings(), func(b cloud.Binding) bool { return b.Role != role })
			j := policyEngine{defaultPolicy.policy, actionsOf(map[Method]Rule{m: other}), new(atomic.Int64)}
			_, wrong := compare(j, map[Method]Rule{m: rule}, []*cloud.Caller{{User: "u", Proof: cloud.ProofPassword, Bindings: held}})
			require.NotEmpty(t, wrong, "%s for %s", m, role)
		}
	}
}

package auth

import (
	_ "embed"
	"fmt"
	"sync/atomic"

	"github.com/cedar-policy/cedar-go"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

//go:embed policy.cedar
var policyText []byte

// policyEngine evaluates a Cedar policy. actions holds the authorization table as Cedar entities.
type policyEngine struct {
	policy  *cedar.PolicySet
	actions cedar.EntityMap
	// evaluations counts how often the method permits was called.
	evaluations *atomic.Int64
}

// Evaluations returns how often the policy was evaluated for calls since the program started.
func Evaluations() int64 { return defaultPolicy.evaluations.Load() }

// defaultPolicy evaluates the policy in policyText with the authorization table rules.
var defaultPolicy = mustPolicyEngine(policyText, rules)

func newPolicyEngine(text []byte, table map[Method]Rule) (policyEngine, error) {
	set, err := cedar.NewPolicySetFromBytes("policy.cedar", text)
	return policyEngine{set, actionsOf(table), new(atomic.Int64)}, err
}

func mustPolicyEngine(text []byte, table map[Method]Rule) policyEngine {
	j, err := newPolicyEngine(text, table)
	if err != nil {
		panic(fmt.Sprintf("the policy that is built in does not parse: %v", err))
	}
	return j
}

func actionOf(m Method) cedar.EntityUID { return cedar.NewEntityUID("Action", cedar.String(m)) }

// actionsOf returns one Cedar action per method. The parents of an action are one group for each role that may call the
// method.
func actionsOf(table map[Method]Rule) cedar.EntityMap {
	out := cedar.EntityMap{}
	for m, rule := range table {
		var groups []cedar.EntityUID
		for _, role := range rule.Roles {
			groups = append(groups, cedar.NewEntityUID("Grants", cedar.String(role)))
		}
		uid := actionOf(m)
		out[uid] = cedar.Entity{UID: uid, Parents: cedar.NewEntityUIDSet(groups...)}
	}
	return out
}

// permits reports whether the policy allows the caller c to call the method m. The parameter at is the tenant of the
// call, and roles holds the caller's roles in that tenant.
func (j policyEngine) permits(c *cloud.Caller, m Method, at cloud.Tenant, roles []cloud.Role) bool {
	j.evaluations.Add(1)
	roleValues := make([]cedar.Value, len(roles))
	for i, role := range roles {
		roleValues[i] = cedar.String(role)
	}
	kind := cedar.EntityType("Principal")
	if c.Node != "" {
		kind = "Host"
	}
	decision, _ := cedar.Authorize(j.policy, j.actions, cedar.Request{
		Principal: cedar.NewEntityUID(kind, cedar.String(c.Name())),
		Action:    actionOf(m),
		Resource:  cedar.NewEntityUID("Place", cedar.String(at.String())),
		Context: cedar.NewRecord(cedar.RecordMap{
			"proven": cedar.Boolean(c.Authenticated()),
			"proof":  cedar.String(c.Proof),
			"roles":  cedar.NewSet(roleValues...),
		}),
	})
	return decision == cedar.Allow
}

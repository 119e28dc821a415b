package cloud

import (
	"fmt"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Proof says how the holder of a token showed who they are.
type Proof string

const (
	ProofNone     Proof = "none"
	ProofPassword Proof = "password"
	// ProofAppCred is a service account's secret.
	ProofAppCred Proof = "appcred"
	// ProofOIDC is the word of an outside OpenID provider.
	ProofOIDC Proof = "oidc"
	// ProofInvitation is a one-use token with which a member joins.
	ProofInvitation Proof = "invitation"
	// ProofHostKey is the token that a member signs for itself: its holder reads the member's directory.
	ProofHostKey Proof = "hostkey"
	// ProofMTLS is a client certificate.
	ProofMTLS Proof = "mtls"
	// ProofDev is what a holder without proof counts as under --dev.
	ProofDev Proof = "dev"
)

// Role is what a binding grants.
type Role string

const (
	SystemAdmin   Role = "system:admin"
	OrgAdmin      Role = "org:admin"
	ProjectAdmin  Role = "project:admin"
	ProjectMember Role = "project:member"
	ProjectViewer Role = "project:viewer"
	BillingAdmin  Role = "billing:admin"
)

// Roles lists every role, most powerful first.
func Roles() []Role {
	return []Role{SystemAdmin, OrgAdmin, ProjectAdmin, ProjectMember, ProjectViewer, BillingAdmin}
}

// Binding is a role held somewhere: a system role nowhere in particular, an org role in an org, a project role in both.
type Binding struct {
	Role    Role
	Org     OrgID     `cbor:",omitempty"`
	Project ProjectID `cbor:",omitempty"`
	// Incarnation is the incarnation of the project. The binding grants nothing in a later project of the same ID.
	Incarnation Incarnation `cbor:",omitempty"`
}

// Same reports whether both bindings have the same role, org and project, ignoring the incarnation.
func (b Binding) Same(other Binding) bool {
	b.Incarnation = other.Incarnation
	return b == other
}

// Check says whether the binding makes sense.
func (b Binding) Check() error {
	if !slices.Contains(Roles(), b.Role) {
		return fault.Invalid("binding.role", "unknown role %q; one of %v", b.Role, Roles())
	}
	wantOrg := strings.HasPrefix(string(b.Role), "org:") || strings.HasPrefix(string(b.Role), "project:")
	wantProject := strings.HasPrefix(string(b.Role), "project:")
	for _, c := range []struct {
		field, value string
		want         bool
	}{{"binding.org_id", string(b.Org), wantOrg}, {"binding.project_id", string(b.Project), wantProject}} {
		if !c.want && c.value != "" {
			return fault.Invalid(c.field, "a %s binding has none", b.Role)
		}
		if c.want {
			if err := CheckCallerID(c.field, c.value); err != nil {
				return err
			}
		}
	}
	return nil
}

// Caller is who makes a call, as the edge verified it. It travels with a call to the leader.
type Caller struct {
	User  UserID
	Proof Proof
	// Scope is the tenant that the token was asked for; empty for system scope.
	Scope Tenant
	// Chosen is the tenant that the metadata of the call names; either part may be empty.
	Chosen Tenant
	// Bindings as they were when the call was let in.
	Bindings []Binding
	// Defaults are the places of calls and tokens that name none.
	Defaults Defaults
	// Node is set instead of User for an agent's certificate.
	Node NodeID
	// TokenID is the token's, and Expires its end.
	TokenID string
	Expires Time
	// Method and Tenant are what the caller was let in for, Target is what the request named, Address where it came from:
	// for the audit.
	Method  string
	Tenant  Tenant
	Target  string
	Address string
	// RequestID is the call's.
	RequestID string
	// IdempotencyKey is what the caller sent, at most MaxIdempotencyKey bytes.
	IdempotencyKey string
}

// Proven reports whether the caller proved who they are.
func (c *Caller) Proven() bool {
	return c.Proof != ProofNone && c.Proof != "" || mutant.On(mutant.TrustUnproven)
}

// Has reports whether the caller holds a role, at a place for roles that have one. An unproven caller holds nothing.
func (c *Caller) Has(role Role, at Tenant) bool {
	if !c.Proven() {
		return false
	}
	return slices.ContainsFunc(c.Bindings, func(b Binding) bool {
		return b.Role == role && (b.Org == "" || b.Org == at.Org) && (b.Project == "" || b.Project == at.Project)
	})
}

// Governs reports whether the caller rules the whole cloud: system:admin, with a token that is not bound to a part of it.
func (c *Caller) Governs() bool { return c.Scope == (Tenant{}) && c.Has(SystemAdmin, Tenant{}) }

// Payer returns the tenant that the call counts for, in budgets and in the audit: the one that it was admitted for. A call
// of a service account that belongs to no tenant counts for the account's project, because whoever governs a project makes
// as many accounts there as they like.
func (c *Caller) Payer() Tenant {
	if c.Tenant == (Tenant{}) && c.Proof == ProofAppCred {
		return c.Scope
	}
	return c.Tenant
}

// Name is how the caller appears in records and logs.
func (c *Caller) Name() string {
	if c.Node != "" {
		return fmt.Sprintf("node/%s", c.Node)
	}
	return string(c.User)
}

// Reaches reports whether the caller has a role in a project or, if at names only an org, in the org or one of its
// projects. A role for the whole cloud counts for every tenant. It is false for an unauthenticated caller.
func (c *Caller) Reaches(at Tenant) bool {
	return c.Proven() && slices.ContainsFunc(c.Bindings, func(b Binding) bool {
		return b.Org == "" || b.Org == at.Org && (at.Project == "" || b.Project == "" || b.Project == at.Project)
	})
}

// ProjectIn returns the project of a call within an org: the project of the token's scope, else of the call's metadata,
// else the default project. It returns "" if there is none, or several and no default. It does not check that a project
// chosen by an org:admin is in the org.
func (c *Caller) ProjectIn(org OrgID) ProjectID {
	if c.Scope.Project != "" {
		if c.Scope.Org == org {
			return c.Scope.Project
		}
		return ""
	}
	chosen := Tenant{Org: org, Project: c.Chosen.Project}
	if chosen.Project != "" && (c.Chosen.Org == "" || c.Chosen.Org == org) && c.Reaches(chosen) {
		return chosen.Project
	}
	found := ProjectsOf(c.Bindings, org)
	if preferred := c.Defaults.ProjectIn(org); slices.Contains(found, Tenant{Org: org, Project: preferred}) {
		return preferred
	}
	if len(found) == 1 {
		return found[0].Project
	}
	return ""
}

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
	// Incarnation is that of the project: the binding gives nothing in a later project of the same ID.
	Incarnation Incarnation `cbor:",omitempty"`
}

// Same reports whether both give the same role at the same place, whatever the incarnation of its project.
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
	// Bindings as they were when the call was let in.
	Bindings []Binding
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

// Name is how the caller appears in records and logs.
func (c *Caller) Name() string {
	if c.Node != "" {
		return fmt.Sprintf("node/%s", c.Node)
	}
	return string(c.User)
}

// ProjectIn is the project of an org that the caller acts in: the token's, or the only one that they have a role in. Empty
// when there is none, or a choice.
func (c *Caller) ProjectIn(org OrgID) (project ProjectID) {
	if c.Scope.Project != "" {
		if c.Scope.Org == org {
			project = c.Scope.Project
		}
		return project
	}
	for _, b := range c.Bindings {
		if b.Org != org || b.Project == "" || b.Project == project {
			continue
		}
		if project != "" {
			return ""
		}
		project = b.Project
	}
	return project
}

package cloud

import (
	"fmt"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Proof is the method by which a caller authenticated.
type Proof string

const (
	ProofNone     Proof = "none"
	ProofPassword Proof = "password"
	// ProofAppCred is the secret of a service account.
	ProofAppCred Proof = "appcred"
	// ProofOIDC is an ID token of an external OpenID provider.
	ProofOIDC Proof = "oidc"
	// ProofInvitation is a join token, with which a member gets the cluster key once.
	ProofInvitation Proof = "invitation"
	// ProofHostKey is a token of the administrator that is signed with a key derived from the cluster key. Only a
	// holder of the cluster key can make it.
	ProofHostKey Proof = "hostkey"
	// ProofMTLS is a client certificate of the cluster's certificate authority.
	ProofMTLS Proof = "mtls"
	// ProofDev is the proof of unauthenticated callers on a member that runs with --dev.
	ProofDev Proof = "dev"
)

// Role is a named set of rights. A Binding gives a role to a principal.
type Role string

const (
	SystemAdmin   Role = "system:admin"
	OrgAdmin      Role = "org:admin"
	ProjectAdmin  Role = "project:admin"
	ProjectMember Role = "project:member"
	ProjectViewer Role = "project:viewer"
	BillingAdmin  Role = "billing:admin"
)

// Roles returns every role: those for orgs and projects from the most to the least powerful, then BillingAdmin.
func Roles() []Role {
	return []Role{SystemAdmin, OrgAdmin, ProjectAdmin, ProjectMember, ProjectViewer, BillingAdmin}
}

// Binding gives its owner a role: in a project of an org if the role begins with "project:", in an org if it begins
// with "org:", and otherwise in the whole cloud.
type Binding struct {
	Role    Role
	Org     OrgID     `cbor:",omitempty"`
	Project ProjectID `cbor:",omitempty"`
	// Incarnation is that of the project when the role was given. The binding gives no access to a later project with
	// the same ID.
	Incarnation Incarnation `cbor:",omitempty"`
}

// Same reports whether both bindings have the same role, org and project. It ignores the incarnation.
func (b Binding) Same(other Binding) bool {
	b.Incarnation = other.Incarnation
	return b == other
}

// Check returns an InvalidArgument fault if the role is unknown, or if the org or project that the role needs is
// missing, malformed or superfluous.
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
			return fault.Invalid(c.field, "must be empty in a %s binding", b.Role)
		}
		if c.want {
			if err := CheckCallerID(c.field, c.value); err != nil {
				return err
			}
		}
	}
	return nil
}

// Caller is the verified identity of the caller of an RPC, with facts about the call. It is forwarded to the leader
// with the call.
type Caller struct {
	User  UserID
	Proof Proof
	// Scope is the tenant to which the caller's token is limited; empty if the token is not limited.
	Scope Tenant
	// Chosen is the tenant that the metadata of the call names; either part may be empty.
	Chosen Tenant
	// Bindings are the caller's bindings at the time when the call was authorized.
	Bindings []Binding
	// Defaults are the tenants of the caller's calls and tokens that name none.
	Defaults Defaults
	// Node is the ID of the host whose agent is the caller, authenticated by its certificate. User is then empty.
	Node NodeID
	// TokenID is the ID of the token, and Expires the time when it expires.
	TokenID string
	Expires Time
	// Method and Tenant are the method and the tenant for which the call was authorized, Target is the resource that
	// the request names, and Address the client's address. The audit records contain them.
	Method  string
	Tenant  Tenant
	Target  string
	Address string
	// RequestID is the ID of the call, which is in logs, errors and audit records.
	RequestID string
	// IdempotencyKey is the key that the caller sent, at most MaxIdempotencyKey bytes.
	IdempotencyKey string
}

// Authenticated reports whether the caller proved its identity: whether Proof is neither ProofNone nor empty.
func (c *Caller) Authenticated() bool {
	return c.Proof != ProofNone && c.Proof != "" || mutant.On(mutant.TrustUnproven)
}

// Has reports whether the caller has a role in the tenant at, through a binding of the project, its org or the whole
// cloud. It returns false for unauthenticated callers.
func (c *Caller) Has(role Role, at Tenant) bool {
	if !c.Authenticated() {
		return false
	}
	return slices.ContainsFunc(c.Bindings, func(b Binding) bool {
		return b.Role == role && (b.Org == "" || b.Org == at.Org) && (b.Project == "" || b.Project == at.Project)
	})
}

// IsCloudAdmin reports whether the caller administers the whole cloud: system:admin, with a token that is not limited
// to a tenant.
func (c *Caller) IsCloudAdmin() bool { return c.Scope == (Tenant{}) && c.Has(SystemAdmin, Tenant{}) }

// Payer returns the tenant that is charged for the call in budgets and in the audit log: the tenant for which the call
// was authorized. A call of a service account without a tenant is charged to the account's project, because a project's
// administrators can create any number of accounts there.
func (c *Caller) Payer() Tenant {
	if c.Tenant == (Tenant{}) && c.Proof == ProofAppCred {
		return c.Scope
	}
	return c.Tenant
}

// Name returns the name of the caller for records and logs: the user ID, or node/<ID> for an agent.
func (c *Caller) Name() string {
	if c.Node != "" {
		return fmt.Sprintf("node/%s", c.Node)
	}
	return string(c.User)
}

// HasRoleIn reports whether the caller has a role in a project or, if at names only an org, in the org or one of its
// projects. A role for the whole cloud counts for every tenant. HasRoleIn returns false for an unauthenticated caller.
func (c *Caller) HasRoleIn(at Tenant) bool {
	return c.Authenticated() && slices.ContainsFunc(c.Bindings, func(b Binding) bool {
		return b.Org == "" || b.Org == at.Org && (at.Project == "" || b.Project == "" || b.Project == at.Project)
	})
}

// ProjectIn returns the project of a call that names only an org: the project of the token's scope, else that of the
// call's metadata, else the caller's default or only project in the org. It returns "" if there is none of these. It
// does not check that a project chosen by an org:admin is in the org.
func (c *Caller) ProjectIn(org OrgID) ProjectID {
	if c.Scope.Project != "" {
		if c.Scope.Org == org {
			return c.Scope.Project
		}
		return ""
	}
	chosen := Tenant{Org: org, Project: c.Chosen.Project}
	if chosen.Project != "" && (c.Chosen.Org == "" || c.Chosen.Org == org) && c.HasRoleIn(chosen) {
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

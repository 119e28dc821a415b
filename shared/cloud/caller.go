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
	// ProofInvitation is a join token, with which a new member of the cluster fetches the cluster key once.
	ProofInvitation Proof = "invitation"
	// ProofHostKey is a token of the administrator that is signed with a key derived from the cluster key. Only a
	// holder of the cluster key can make it.
	ProofHostKey Proof = "hostkey"
	// ProofMTLS is a client certificate of the cluster's certificate authority.
	ProofMTLS Proof = "mtls"
	// ProofDev is the proof of callers without credentials on a member that runs with --dev.
	ProofDev Proof = "dev"
)

// Role is a named set of permissions. A Binding gives a role to a user or service account.
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

// Binding gives its owner a role. The role applies in a project of an org if its name begins with "project:", in an org
// if its name begins with "org:", and otherwise in the whole cloud.
type Binding struct {
	Role    Role
	Org     OrgID     `cbor:",omitempty"`
	Project ProjectID `cbor:",omitempty"`
	// Incarnation is the incarnation of the project when the role was given. If the project is deleted and its ID used
	// again, the new project has another incarnation, and the binding gives no access to it.
	Incarnation Incarnation `cbor:",omitempty"`
}

// Tenant returns the org and the project in which the role applies.
func (b Binding) Tenant() Tenant { return Tenant{b.Org, b.Project} }

// Same reports whether both bindings have the same role, org and project. It ignores the incarnation.
func (b Binding) Same(other Binding) bool {
	b.Incarnation = other.Incarnation
	return b == other
}

// Check returns an InvalidArgument fault if the role is unknown. It also does so if an org or project that the role
// needs is missing or malformed, or if one is set that the role does not need.
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

// Caller is the verified identity of the caller of an RPC, with properties of the call. It is sent along when a call is
// forwarded to the leader.
type Caller struct {
	User  UserID
	Proof Proof
	// Scope is the tenant to which the caller's token is limited; empty if the token is not limited.
	Scope Tenant
	// Chosen is the tenant that the caller chose in the metadata of the call. Its org, its project or both may be
	// empty.
	Chosen Tenant
	// Bindings are the caller's bindings at the time when the call was authorized.
	Bindings []Binding
	// Defaults are the tenants that are used for the caller's calls and tokens that name no tenant.
	Defaults Defaults
	// Node is the ID of the host whose agent made the call, from the agent's certificate. It is empty for other
	// callers. If it is set, User is empty.
	Node NodeID
	// TokenID is the ID of the caller's token, and Expires the time at which the token expires.
	TokenID string
	Expires Time
	// Method and Tenant are the method and the tenant for which the call was authorized, Target is the resource that
	// the request names, and Address is the client's address. All are written to the audit log.
	Method  string
	Tenant  Tenant
	Target  string
	Address string
	// RequestID is the ID of the call. Logs, errors and audit records contain it.
	RequestID string
	// IdempotencyKey is the key that the caller sent, at most MaxIdempotencyKey bytes.
	IdempotencyKey string
	// Recorded is true if the audit already has a record that the call succeeded, although the call goes on, like an open
	// console. Its end is then not recorded. Only the goroutine of the call's handler sets it.
	Recorded bool
}

// Authenticated reports whether the caller proved its identity, which means that Proof is neither empty nor ProofNone.
func (c *Caller) Authenticated() bool {
	return c.Proof != ProofNone && c.Proof != "" || mutant.On(mutant.TrustUnproven)
}

// Has reports whether the caller has a role in the tenant, by a binding for the project, for its org or for the whole
// cloud. It returns false if the caller is not authenticated.
func (c *Caller) Has(role Role, at Tenant) bool {
	if !c.Authenticated() {
		return false
	}
	return slices.ContainsFunc(c.Bindings, func(b Binding) bool {
		return b.Role == role && (b.Org == "" || b.Org == at.Org) && (b.Project == "" || b.Project == at.Project)
	})
}

// IsCloudAdmin reports whether the caller administers the whole cloud: the caller has the role system:admin, and its
// token is not limited to a tenant.
func (c *Caller) IsCloudAdmin() bool { return c.Scope == (Tenant{}) && c.Has(SystemAdmin, Tenant{}) }

// Payer returns the tenant in whose budgets the call counts, and which the call's audit record names. That is the
// tenant for which the call was authorized. If there is none and the caller is a service account, it is the project of
// the account, because a project's administrators can create any number of accounts there.
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

// HasRoleIn reports whether the caller has any role in a project. If the tenant names only an org, it reports whether
// the caller has any role in the org or one of its projects. A role for the whole cloud counts for every tenant.
// HasRoleIn returns false if the caller is not authenticated.
func (c *Caller) HasRoleIn(at Tenant) bool {
	return c.Authenticated() && slices.ContainsFunc(c.Bindings, func(b Binding) bool {
		return b.Org == "" || b.Org == at.Org && (at.Project == "" || b.Project == "" || b.Project == at.Project)
	})
}

// ProjectIn returns the project of a call that names only an org. If the caller's token is limited to a project, it
// returns that project, or "" if that project is in another org. Otherwise it returns the first of these that exists:
// the project in the metadata of the call, if the caller has a role there; the caller's default project in the org; the
// only project of the org in which the caller has a role. If there is none, it returns "". It does not check that a
// project chosen by an org:admin is in the org.
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

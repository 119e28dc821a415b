// Package cloud is what Trivet is about: virtual machines, images, nodes, tenants, and the rules that hold of them
// wherever they are looked at. Read it first.
//
// It does no I/O, reads no clock and draws no randomness: time and ids come in as values. It knows neither the wire
// (package wire translates) nor how records are stored. Timestamps are Unix milliseconds. Numbers of enumerations are
// the spec's (part 2.3).
package cloud

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// Ids are types, so that one cannot stand where another belongs.
type (
	VMID      string
	ImageID   string
	NodeID    string
	OrgID     string
	ProjectID string
	UserID    string
)

// Time is Unix milliseconds.
type Time = int64

var (
	namePattern   = regexp.MustCompile(`^[a-z][a-z0-9-]{0,62}$`)
	callerID      = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$`)
	devicePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)
)

// Limits of overview part 6, in one place.
const (
	MaxVCPUs          = 288
	MinMemoryMiB      = 64
	MaxMemoryMiB      = 12 << 20
	MaxDisks          = 16
	MaxDiskGiB        = 64 << 10
	MaxNICs           = 8
	MaxPairs          = 64
	MaxPairKey        = 128
	MaxPairValue      = 1 << 10
	MaxCmdline        = 2 << 10
	MaxStopSeconds    = 600
	DefaultStop       = 30 * 1000
	DefaultPage       = 100
	MaxPage           = 1000
	MaxIdempotencyKey = 255
	MaxFilter         = 4 << 10
	DefaultDiskGiB    = 10
	DefaultMemory     = 512
)

// CheckName says whether s can name a thing.
func CheckName(field, s string) error {
	if !namePattern.MatchString(s) {
		return fault.Invalid(field, "must be 1 to 63 characters of a-z, 0-9 and -, starting with a letter")
	}
	return nil
}

// CheckCallerID says whether s can be an id that callers choose: of a user, an org, a project.
func CheckCallerID(field, s string) error {
	if !callerID.MatchString(s) {
		return fault.Invalid(field, "must be 1 to 63 characters of A-Z, a-z, 0-9 and ._@-, starting with a letter or digit")
	}
	return nil
}

// CheckUUID says whether s can be an id that we make. An id of another form is INVALID_ARGUMENT, not NOT_FOUND (the
// spec's part 5.4).
func CheckUUID(field, s string) error {
	if s == "" {
		return fault.Invalid(field, "is required")
	}
	if u, err := uuid.Parse(s); err != nil || u.String() != s {
		return fault.Invalid(field, "is not an id: want a lower-case UUID")
	}
	return nil
}

// CheckPairs checks labels or metadata.
func CheckPairs(field string, m map[string]string) error {
	if len(m) > MaxPairs {
		return fault.Invalid(field, "at most %d pairs, got %d", MaxPairs, len(m))
	}
	for k, v := range m {
		switch {
		case k == "" || len(k) > MaxPairKey:
			return fault.Invalid(field, "a key must be 1 to %d bytes", MaxPairKey)
		case len(v) > MaxPairValue:
			return fault.Invalid(field, "the value of %q must be at most %d bytes", k, MaxPairValue)
		case strings.ContainsFunc(k, isControl) || !validText(k) || !validText(v):
			return fault.Invalid(field, "%q must be printable UTF-8", k)
		}
	}
	return nil
}

func isControl(r rune) bool { return r < 0x20 || r == 0x7f }

func validText(s string) bool { return strings.ToValidUTF8(s, "") == s && !strings.ContainsRune(s, 0) }

// Tenant is whose a thing is.
type Tenant struct {
	Org     OrgID
	Project ProjectID
}

func (t Tenant) String() string {
	if t.Project == "" {
		return string(t.Org)
	}
	return string(t.Org) + "/" + string(t.Project)
}

// Proof says how the holder of a token showed who they are.
type Proof string

const (
	ProofNone     Proof = "none"
	ProofPassword Proof = "password"
	// ProofHostKey is the token that a member signs for itself: its holder reads the member's directory.
	ProofHostKey Proof = "hostkey"
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
	// RequestID is the call's.
	RequestID string
	// IdempotencyKey is what the caller sent, at most MaxIdempotencyKey bytes.
	IdempotencyKey string
}

// Has reports whether the caller holds a role, at a place for roles that have one. An unproven caller holds nothing.
func (c *Caller) Has(role Role, at Tenant) bool {
	if c.Proof == ProofNone || c.Proof == "" {
		return false
	}
	return slices.ContainsFunc(c.Bindings, func(b Binding) bool {
		return b.Role == role && (b.Org == "" || b.Org == at.Org) && (b.Project == "" || b.Project == at.Project)
	})
}

// Name is how the caller appears in records and logs.
func (c *Caller) Name() string {
	if c.Node != "" {
		return fmt.Sprintf("node/%s", c.Node)
	}
	return string(c.User)
}

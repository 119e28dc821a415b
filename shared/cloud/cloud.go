// Package cloud defines Trivet's domain: virtual machines, images, nodes, tenants and callers, with the rules that
// apply to them in every component. New readers should start here.
//
// The package does no I/O, reads no clock and uses no randomness: times and IDs are parameters. It does not depend on
// the wire format, to which package convert translates, or on how records are stored. Timestamps are Unix milliseconds.
// The numbers of enumerations are those of the wire contract (protos/vmcontroller/v1).
package cloud

import (
	"regexp"
	"strings"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// IDs of different kinds of objects are distinct types. The compiler then rejects an ID of one kind where another is
// required.
type (
	VMID      string
	ImageID   string
	NodeID    string
	OrgID     string
	ProjectID string
	UserID    string
	GroupID   string
)

// Time is a point in time in Unix milliseconds.
type Time = int64

// Incarnation distinguishes successive projects that have the same ID. Each has another incarnation. It is 0 for a
// project that was created before incarnations were recorded.
type Incarnation int64

var (
	namePattern   = regexp.MustCompile(`^[a-z][a-z0-9-]{0,62}$`)
	callerID      = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$`)
	devicePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)
)

// Limits and defaults of the fields of requests. MaxPairKey, MaxPairValue, MaxCmdline and MaxIdempotencyKey
// are lengths in bytes. DefaultStop is in milliseconds and DefaultMemory in MiB. The other names contain the unit or
// what is counted.
const (
	MaxVCPUs     = 288
	MinMemoryMiB = 64
	MaxMemoryMiB = 12 << 20
	// HugepageMiB is the size of a huge page.
	HugepageMiB       = 2
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
	DefaultDiskGiB    = 10
	DefaultMemory     = 512
)

// CheckName returns an InvalidArgument fault if s cannot be the name of a VM, an image, a volume or a service account.
// Such a name has 1 to 63 characters of a-z, 0-9 and -, and begins with a letter.
func CheckName(field, s string) error {
	if !namePattern.MatchString(s) {
		return fault.Invalid(field, "must be 1 to 63 characters of a-z, 0-9 and -, starting with a letter")
	}
	return nil
}

// CheckCallerID returns an InvalidArgument fault if s is not a valid ID of a user, an org or a project. These IDs are
// chosen by callers.
func CheckCallerID(field, s string) error {
	if s == "" {
		return fault.Invalid(field, "is required")
	}
	if !callerID.MatchString(s) {
		return fault.Invalid(field, "must be 1 to 63 characters of A-Z, a-z, 0-9 and ._@-, starting with a letter or digit")
	}
	return nil
}

// CheckUUID returns an InvalidArgument fault if s is not a lower-case UUID. IDs that the control plane generates have
// this form. The wire contract requires INVALID_ARGUMENT, not NOT_FOUND, for a malformed ID.
func CheckUUID(field, s string) error {
	if s == "" {
		return fault.Invalid(field, "is required")
	}
	if u, err := uuid.Parse(s); err != nil || u.String() != s {
		return fault.Invalid(field, "must be a lower-case UUID")
	}
	return nil
}

// CheckPairs returns an InvalidArgument fault if m cannot be labels or metadata. It may have at most MaxPairs pairs,
// with keys of at most MaxPairKey bytes and values of at most MaxPairValue bytes, all of printable UTF-8.
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

// MaxNodeLabels is the maximum total size of the keys and values of a host's labels, in bytes. It is small because
// every heartbeat of the host contains the labels.
const MaxNodeLabels = 4 << 10

// CheckNodeLabels checks the labels of a host like CheckPairs. It also returns InvalidArgument if their total size
// exceeds MaxNodeLabels.
func CheckNodeLabels(field string, m map[string]string) error {
	if err := CheckPairs(field, m); err != nil {
		return err
	}
	total := 0
	for k, v := range m {
		total += len(k) + len(v)
	}
	if total > MaxNodeLabels {
		return fault.Invalid(field, "at most %d bytes together, got %d", MaxNodeLabels, total)
	}
	return nil
}

func isControl(r rune) bool { return r < 0x20 || r == 0x7f }

func validText(s string) bool { return strings.ToValidUTF8(s, "") == s && !strings.ContainsRune(s, 0) }

// Tenant identifies the owner of a resource: an org, or a project in an org.
type Tenant struct {
	Org     OrgID
	Project ProjectID
}

// ParseTenant returns the tenant with the given IDs, each of which may be empty. It returns InvalidArgument for the
// field org_id or project_id if an ID is malformed.
func ParseTenant(org, project string) (Tenant, error) {
	for _, id := range []struct{ field, value string }{{"org_id", org}, {"project_id", project}} {
		if id.value != "" {
			if err := CheckCallerID(id.field, id.value); err != nil {
				return Tenant{}, err
			}
		}
	}
	return Tenant{OrgID(org), ProjectID(project)}, nil
}

// Contains reports whether other is within t. An org contains its projects, and the zero Tenant contains every tenant.
func (t Tenant) Contains(other Tenant) bool {
	return (t.Org == "" || t.Org == other.Org) && (t.Project == "" || t.Project == other.Project)
}

func (t Tenant) String() string {
	if t.Project == "" {
		return string(t.Org)
	}
	return string(t.Org) + "/" + string(t.Project)
}

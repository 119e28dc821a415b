package tenant

import (
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// defaultQuotas holds the quota of new projects in the record quota-default/projects.
var defaultQuotas = store.NewTable[Quota]("quota-default")

const newProjects = "projects"

// DefaultQuota returns the limits that new projects get. If none were set, it returns a Quota without limits.
func DefaultQuota(r store.Reader) (Quota, error) {
	q, err := defaultQuotas.Get(r, newProjects)
	if err != nil || q == nil {
		return Quota{}, err
	}
	return *q, nil
}

// SetDefaultQuota replaces the limits that new projects get. It does not change existing projects. It returns
// InvalidArgument if q.Projects is set.
func SetDefaultQuota(tx *store.Tx, q Quota) error {
	if err := q.checkProject(); err != nil {
		return err
	}
	defaultQuotas.Put(tx, &q, newProjects)
	return nil
}

// addDefaults sets each limit that q does not set to the default of new projects.
func (q *Quota) addDefaults(r store.Reader) error {
	standard, err := DefaultQuota(r)
	if err != nil || mutant.On(mutant.SkipDefaultQuota) {
		return err
	}
	for _, d := range dimensions {
		if limit := d.limit(q); *limit == nil {
			*limit = *d.limit(&standard)
		}
	}
	return nil
}

// CheckWithinDefault returns PermissionDenied if q, the requested quota of a new project, has a limit above the default
// of new projects. Only system:admin may exceed the default. Limits without a default may be of any size.
func CheckWithinDefault(r store.Reader, q Quota) error {
	standard, err := DefaultQuota(r)
	if err != nil {
		return err
	}
	for _, d := range dimensions {
		most, asked := *d.limit(&standard), *d.limit(&q)
		if most != nil && asked != nil && *asked > *most {
			return fault.New(fault.PermissionDenied, "new projects get %d %s: only system:admin can give a project more, but %d are asked for",
				*most, d.name, *asked).WithReason("ABOVE_DEFAULT_QUOTA").With("quota", d.name).With("limit", *most)
		}
	}
	return nil
}

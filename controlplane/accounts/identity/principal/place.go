package principal

import (
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// setIncarnation stores the incarnation of the role's project in the binding b. It returns NotFound if the org or the
// project does not exist.
func setIncarnation(r store.Reader, b *cloud.Binding) error {
	b.Incarnation = 0
	if b.Org != "" {
		if o, err := tenant.FindOrg(r, b.Org); err != nil {
			return err
		} else if o == nil {
			return tenant.NoOrg(b.Org)
		}
	}
	if b.Project == "" {
		return nil
	}
	p, err := tenant.Find(r, b.Project)
	if err != nil {
		return err
	}
	if p == nil || p.Org != b.Org {
		return tenant.NoProject(b.Project)
	}
	b.Incarnation = p.Incarnation
	return nil
}

package volume

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// named returns the ID of the volume of the tenant with a name, or NotFound.
func (s *Service) named(ctx context.Context, t cloud.Tenant, name string) (string, error) {
	return store.Named(ctx, s.store, names, "volume", name, string(t.Project))
}

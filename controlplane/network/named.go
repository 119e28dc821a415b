package network

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// named returns the ID of the resource of the tenant with a kind and a name, or NotFound.
func (s *Service) named(ctx context.Context, t cloud.Tenant, kind, name string) (string, error) {
	return store.Named(ctx, s.opts.Store, names, kind, name, string(t.Project), kind)
}

package snapshot

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// named returns the ID of the snapshot of the tenant with a name, or NotFound.
func (s *Service) named(ctx context.Context, t cloud.Tenant, name string) (string, error) {
	return store.Named(ctx, s.store, volume.SnapshotNames, "snapshot", name, string(t.Project))
}

package main

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/snapshot"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// readSnapshot reads the content of a snapshot from the host of its volume.
func (m *member) readSnapshot(ctx context.Context, c snapshot.Content, send func([]byte) error) error {
	return m.nodes.ReadSnapshot(ctx, node.SnapshotRead{
		Tenant: c.Tenant, Node: c.Volume.Node, Volume: c.Volume.ID, Snapshot: c.Snapshot, Since: c.Since, Offset: c.Offset,
	}, send)
}

// snapshotSource implements image.Snapshots with the service for snapshots, which is created after the service for
// images.
type snapshotSource struct{ m *member }

func (s snapshotSource) Check(ctx context.Context, t cloud.Tenant, id cloud.SnapshotID) error {
	return s.m.snapshots.Check(ctx, t, id)
}

func (s snapshotSource) Export(ctx context.Context, t cloud.Tenant, id, since cloud.SnapshotID, offset uint64, send func([]byte) error) error {
	return s.m.snapshots.Export(ctx, t, id, since, offset, send)
}

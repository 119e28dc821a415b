package snapshot

import (
	"context"

	"google.golang.org/grpc"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Content identifies what is read from a snapshot.
type Content struct {
	Tenant   cloud.Tenant
	Volume   *cloud.Volume
	Snapshot cloud.SnapshotID
	// Since is an older snapshot of the volume, or empty. Offset is in bytes. Both have the meaning of the fields of
	// ExportSnapshotRequest in storage.v1.
	Since  cloud.SnapshotID
	Offset uint64
}

// Reader reads the content of a snapshot from the host that has it, and calls send with each part of the stream that
// ExportSnapshot of storage.v1 describes.
type Reader func(ctx context.Context, c Content, send func([]byte) error) error

// Export reads the content of a snapshot of the tenant t, or its differences from the older snapshot since, and calls
// send with each part of the stream. It returns the same errors as ExportSnapshot of storage.v1.
func (s *Service) Export(ctx context.Context, t cloud.Tenant, id, since cloud.SnapshotID, offset uint64, send func([]byte) error) error {
	c := Content{Tenant: t, Snapshot: id, Since: since, Offset: offset}
	if err := cloud.CheckUUID("snapshot_id", string(id)); err != nil {
		return err
	}
	if since != "" {
		if err := cloud.CheckUUID("since_snapshot_id", string(since)); err != nil {
			return err
		}
	}
	if err := s.store.View(ctx, func(r *store.View) error { return c.lookup(r) }); err != nil {
		return err
	}
	return s.read(ctx, c, send)
}

// Check returns an error if Export cannot read the whole content of the snapshot.
func (s *Service) Check(ctx context.Context, t cloud.Tenant, id cloud.SnapshotID) error {
	c := Content{Tenant: t, Snapshot: id}
	return s.store.View(ctx, func(r *store.View) error { return c.lookup(r) })
}

// lookup sets the volume, and returns an error if the snapshot cannot be exported.
func (c *Content) lookup(r store.Reader) error {
	one, err := volume.LookupSnapshot(r, c.Tenant, c.Snapshot)
	if err != nil {
		return err
	}
	if err := one.CheckAvailable(); err != nil {
		return err
	}
	if bytes := one.SizeGiB << 30; c.Offset > bytes {
		return fault.New(fault.OutOfRange, "offset: the snapshot has %d bytes, got %d", bytes, c.Offset)
	}
	if c.Since != "" {
		older, err := volume.LookupSnapshot(r, c.Tenant, c.Since)
		if err != nil {
			return err
		}
		if older.Volume != one.Volume || older.TakenAt >= one.TakenAt && older.Status == cloud.SnapshotAvailable {
			return fault.Invalid("since_snapshot_id", "must be an older snapshot of the same volume")
		}
		if err := older.CheckAvailable(); err != nil {
			return err
		}
	}
	if c.Volume, err = volume.Lookup(r, c.Tenant, one.Volume); err != nil {
		return err
	}
	if c.Volume.Encrypted && !mutant.On(mutant.ExportEncrypted) {
		return fault.New(fault.FailedPrecondition, "snapshot %s is of an encrypted volume, and its content cannot be exported: make a volume from the snapshot, and copy the content in a VM", one.Name).
			WithReason("VOLUME_ENCRYPTED")
	}
	return nil
}

func (r *server) ExportSnapshot(in *storagev1.ExportSnapshotRequest, stream grpc.ServerStreamingServer[storagev1.ExportSnapshotResponse]) error {
	t, err := admit(stream.Context(), "ExportSnapshot", in)
	if err != nil {
		return err
	}
	return r.s.Export(stream.Context(), t, cloud.SnapshotID(in.GetSnapshotId()), cloud.SnapshotID(in.GetSinceSnapshotId()), in.GetOffset(),
		func(data []byte) error { return stream.Send(&storagev1.ExportSnapshotResponse{Data: data}) })
}

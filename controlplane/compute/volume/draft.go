package volume

import (
	"context"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Draft describes a volume that a transaction of another package creates with CreateIn. The volume's ID and key are
// chosen before the transaction, so that a transaction that is executed again creates the same volume.
type Draft struct {
	Volume cloud.Volume
	Image  cloud.ImageID
	Key    sealedKey
}

// Draft returns the draft of a volume with the size, driver, class, metadata and labels of v. imageID is the ID of the
// image with whose content the volume begins, or empty for a blank volume. Draft returns InvalidArgument if a field is
// invalid.
func (s *Service) Draft(t cloud.Tenant, v cloud.Volume, imageID cloud.ImageID) (Draft, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return Draft{}, err
	}
	v.Name = "disk-" + id.String()
	return s.draft(id, t, v, imageID)
}

// draft returns the draft of a volume with the given ID, like Draft, and with the name of v.
func (s *Service) draft(id uuid.UUID, t cloud.Tenant, v cloud.Volume, imageID cloud.ImageID) (Draft, error) {
	if err := cloud.CheckVolume(&v); err != nil {
		return Draft{}, err
	}
	if imageID != "" {
		if err := cloud.CheckUUID("image_id", string(imageID)); err != nil {
			return Draft{}, err
		}
	}
	v.ID, v.Org, v.Project = cloud.VolumeID(id.String()), t.Org, t.Project
	return Draft{v, imageID, s.keys.make(v.ID)}, nil
}

// CreateIn creates the volume of a draft in the transaction tx. The volume gets the given name if the name is valid and
// no other volume of the project has it. Otherwise the name of the volume is disk-<ID>. CreateIn returns the same
// errors as the RPC CreateVolume.
func (s *Service) CreateIn(ctx context.Context, tx *store.Tx, d *Draft, name string) (cloud.Volume, error) {
	q := change{Tenant: d.Volume.Tenant(), Volume: d.Volume, Image: d.Image, Key: d.Key}
	holder, err := names.Get(tx, string(d.Volume.Project), name)
	if err != nil {
		return cloud.Volume{}, err
	}
	if holder == nil && cloud.CheckName("name", name) == nil {
		q.Volume.Name = name
	}
	v, err := create(ctx, tx, &q)
	if err != nil {
		return v, err
	}
	return v, s.billing.AdmitVolume(tx, &v)
}

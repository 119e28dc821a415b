package vm

import (
	"context"
	"time"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/volume"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// newVolumes are the volumes that `trivet vm create` has created for disks with a storage class.
type newVolumes struct {
	s      *session.Session
	client vmv1.VolumeServiceClient
	made   []*vmv1.Volume
}

// volumeOf returns the ID of the volume of a disk, or "" if the disk is not a volume. For a disk with a storage class,
// volumeOf creates the volume, with the name <VM>-<disk ID>.
func (n *newVolumes) volumeOf(ctx context.Context, conn *dial.Conn, vm string, d disk, imageID string) (string, error) {
	if d.volume != "" {
		return volume.Find(ctx, n.s, conn, d.volume)
	}
	if d.class == "" {
		return "", nil
	}
	n.client = vmv1.NewVolumeServiceClient(conn)
	req := &vmv1.CreateVolumeRequest{Name: vm + "-" + d.id, SizeGib: d.sizeGiB, StorageClass: d.class, ImageId: imageID}
	req.OrgId, req.ProjectId = n.s.Tenant()
	v, err := n.client.CreateVolume(ctx, req)
	if err != nil {
		return "", err
	}
	n.made = append(n.made, v)
	return v.GetId(), nil
}

// deleteTimeout is the maximum time to delete the volumes of a VM that was not created.
const deleteTimeout = 10 * time.Second

// deleteAll deletes the created volumes. It is called when the VM could not be created. It runs for up to
// deleteTimeout, even if ctx has ended.
func (n *newVolumes) deleteAll(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteTimeout)
	defer cancel()
	for _, v := range n.made {
		req := &vmv1.DeleteVolumeRequest{OrgId: v.GetOrgId(), ProjectId: v.GetProjectId(), VolumeId: v.GetId()}
		if _, err := n.client.DeleteVolume(ctx, req); err != nil {
			n.s.Note("volume %s, created for the VM, could not be deleted: %v", v.GetName(), err)
		}
	}
}

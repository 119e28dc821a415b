package convert

import (
	"strconv"

	"github.com/trivet-cloud/trivet/shared/cloud"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// VolumeDriver converts a driver from its protobuf enumeration. A number outside 0 to 254 becomes 255, which every
// check rejects.
func VolumeDriver(d vmv1.VolumeDriverKind) cloud.VolumeDriver { return enum[cloud.VolumeDriver](d) }

// Volume returns a volume record as the message of the API. The last error of the host is in the metadata, under
// cloud.VolumeReason. While the volume is flattened, the metadata also has the progress under cloud.VolumeFlatten.
func Volume(v *cloud.Volume) *vmv1.Volume {
	out := &vmv1.Volume{
		Id: string(v.ID), Name: v.Name, OrgId: string(v.Org), ProjectId: string(v.Project), SizeGib: v.SizeGiB,
		Driver: vmv1.VolumeDriverKind(v.Driver), StorageClass: v.Class, Format: vmv1.VolumeFormat(v.Format),
		Status: vmv1.VolumeStatus(v.Status()), AttachedToVm: string(v.VM), Metadata: copyMap(v.Metadata), Labels: copyMap(v.Labels),
		CreatedAt: v.CreatedAt, UpdatedAt: v.UpdatedAt, AttachedToNode: string(v.Node), AttachmentGeneration: v.AttachmentGeneration,
		LastFlushedAttachmentGeneration: v.FlushedGeneration,
		Backing:                         volumeBacking(v),
	}
	if out.Metadata == nil && (v.LastError != "" || v.Flatten) {
		out.Metadata = map[string]string{}
	}
	if v.LastError != "" {
		out.Metadata[cloud.VolumeReason] = v.LastError
	}
	if v.Flatten {
		out.Metadata[cloud.VolumeFlatten] = strconv.FormatUint(uint64(v.FlattenPercent), 10)
	}
	return out
}

// volumeBacking returns where the bytes of a volume are. The cluster and the pool of an RBD image are not in the record of
// the volume, but in its storage class.
func volumeBacking(v *cloud.Volume) *vmv1.VolumeBacking {
	if v.Driver == cloud.DriverRBD {
		return &vmv1.VolumeBacking{Backing: &vmv1.VolumeBacking_Rbd{Rbd: &vmv1.RbdBacking{Image: v.RBDImage()}}}
	}
	return &vmv1.VolumeBacking{Backing: &vmv1.VolumeBacking_Managed{Managed: &vmv1.ManagedVolumeBacking{}}}
}

// VolumeFrom returns the volume that a request describes. Its ID and the fields that the control plane sets are empty.
func VolumeFrom(in *vmv1.CreateVolumeRequest) cloud.Volume {
	return cloud.Volume{
		Name: in.GetName(), Org: cloud.OrgID(in.GetOrgId()), Project: cloud.ProjectID(in.GetProjectId()), SizeGiB: in.GetSizeGib(),
		Driver: VolumeDriver(in.GetDriver()), Class: in.GetStorageClass(), Metadata: copyMap(in.GetMetadata()), Labels: copyMap(in.GetLabels()),
	}
}

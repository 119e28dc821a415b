package convert

import (
	"github.com/trivet-cloud/trivet/shared/cloud"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// Image returns an image record as the message of the API.
func Image(i *cloud.Image) *vmv1.Image {
	return &vmv1.Image{
		Id: string(i.ID), Name: i.Name, OrgId: string(i.Org), Visibility: vmv1.Visibility(i.Visibility),
		Format: vmv1.ImageFormat(i.Format), SizeBytes: i.SizeBytes, Checksum: i.Checksum(), OsType: vmv1.OsType(i.OSType),
		OsVersion: i.OSVersion, Architecture: vmv1.Architecture(i.Architecture), MinDiskGib: i.MinDiskGiB,
		MinMemoryMib: i.MinMemoryMiB, Status: vmv1.ImageStatus(i.Status), CreatedAt: i.CreatedAt, UpdatedAt: i.UpdatedAt,
		Metadata: copyMap(i.Metadata),
	}
}

// ImageFrom returns the image that a CreateImage request describes. Values that the server sets, such as the ID, are
// not set.
func ImageFrom(r *vmv1.CreateImageRequest) cloud.Image {
	return cloud.Image{
		Name: r.GetName(), Org: cloud.OrgID(r.GetOrgId()), Visibility: enum[cloud.Visibility](r.GetVisibility()),
		Format: enum[cloud.ImageFormat](r.GetFormat()), OSType: enum[cloud.OSType](r.GetOsType()), OSVersion: r.GetOsVersion(),
		Architecture: enum[cloud.Architecture](r.GetArchitecture()), MinDiskGiB: r.GetMinDiskGib(), MinMemoryMiB: r.GetMinMemoryMib(),
		Metadata: copyMap(r.GetMetadata()), Source: r.GetSourceUrl(),
	}
}

// Visibility converts a visibility from its protobuf enumeration. A number outside 0 to 254 becomes 255, which every
// check rejects.
func Visibility(v vmv1.Visibility) cloud.Visibility { return enum[cloud.Visibility](v) }

package volume

import (
	"testing"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestCallsAreUnimplemented makes calls with and without errors. Each must check the authorization first, then the
// arguments, and return UNIMPLEMENTED if both are correct.
func TestCallsAreUnimplemented(t *testing.T) {
	as := func(role cloud.Role, project cloud.ProjectID) *cloud.Caller {
		b := cloud.Binding{Role: role, Org: "o", Project: project}
		if role == cloud.SystemAdmin {
			b = cloud.Binding{Role: role}
		}
		return &cloud.Caller{User: "u", Proof: cloud.ProofPassword, Scope: cloud.Tenant{Org: "o", Project: "p"}, Bindings: []cloud.Binding{b}}
	}
	member, viewer, admin := as(cloud.ProjectMember, "p"), as(cloud.ProjectViewer, "p"), as(cloud.SystemAdmin, "")
	const id = "0190a000-0000-7000-8000-000000000001"
	rbd := &vmv1.RbdBacking{ClusterId: "c", Pool: "p", Image: "i"}
	for _, c := range []struct {
		name  string
		who   *cloud.Caller
		in    any
		kind  fault.Kind
		field string
	}{
		{"a caller without authentication", nil, &vmv1.GetVolumeRequest{}, fault.Unauthenticated, ""},
		{"a viewer that writes", viewer, &vmv1.CreateVolumeRequest{}, fault.PermissionDenied, ""},
		{"another project", member, &vmv1.GetVolumeRequest{ProjectId: "q"}, fault.PermissionDenied, ""},
		{"no name", member, &vmv1.CreateVolumeRequest{SizeGib: 1}, fault.InvalidArgument, "name"},
		{"no size", member, &vmv1.CreateVolumeRequest{Name: "v"}, fault.InvalidArgument, "size_gib"},
		{"too large", member, &vmv1.CreateVolumeRequest{Name: "v", SizeGib: cloud.MaxDiskGiB + 1}, fault.InvalidArgument, "size_gib"},
		{"an unknown driver", member, &vmv1.CreateVolumeRequest{Name: "v", SizeGib: 1, Driver: 9}, fault.InvalidArgument, "driver"},
		{"an invalid image ID", member, &vmv1.CreateVolumeRequest{Name: "v", SizeGib: 1, ImageId: "/x"}, fault.InvalidArgument, "image_id"},
		{"a bad label", member, &vmv1.CreateVolumeRequest{Name: "v", SizeGib: 1, Labels: map[string]string{"": "x"}}, fault.InvalidArgument, "labels"},
		{"create", member, &vmv1.CreateVolumeRequest{Name: "v", SizeGib: 1, ImageId: id}, fault.Unimplemented, ""},
		{"get without an ID", viewer, &vmv1.GetVolumeRequest{}, fault.InvalidArgument, "volume_id"},
		{"get", viewer, &vmv1.GetVolumeRequest{VolumeId: id}, fault.Unimplemented, ""},
		{"a page size of 1001", viewer, &vmv1.ListVolumesRequest{PageSize: 1001}, fault.InvalidArgument, "page_size"},
		{"an invalid page token", viewer, &vmv1.ListVolumesRequest{PageToken: "x"}, fault.InvalidArgument, "page_token"},
		{"list", viewer, &vmv1.ListVolumesRequest{}, fault.Unimplemented, ""},
		{"delete", member, &vmv1.DeleteVolumeRequest{VolumeId: id}, fault.Unimplemented, ""},
		{"resize to size 0", member, &vmv1.ResizeVolumeRequest{VolumeId: id}, fault.InvalidArgument, "size_gib"},
		{"resize", member, &vmv1.ResizeVolumeRequest{VolumeId: id, SizeGib: 2}, fault.Unimplemented, ""},
		{"register as a project member", member, &vmv1.RegisterExternalVolumeRequest{Name: "v", SizeGib: 1, Rbd: rbd}, fault.PermissionDenied, ""},
		{"register without an RBD image", admin, &vmv1.RegisterExternalVolumeRequest{Name: "v", SizeGib: 1}, fault.InvalidArgument, "rbd"},
		{"register", admin, &vmv1.RegisterExternalVolumeRequest{Name: "v", SizeGib: 1, Rbd: rbd}, fault.Unimplemented, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx := t.Context()
			if c.who != nil {
				ctx = auth.With(ctx, c.who, auth.RPC)
			}
			var err error
			switch in := c.in.(type) {
			case *vmv1.CreateVolumeRequest:
				_, err = server{}.CreateVolume(ctx, in)
			case *vmv1.GetVolumeRequest:
				_, err = server{}.GetVolume(ctx, in)
			case *vmv1.ListVolumesRequest:
				_, err = server{}.ListVolumes(ctx, in)
			case *vmv1.DeleteVolumeRequest:
				_, err = server{}.DeleteVolume(ctx, in)
			case *vmv1.ResizeVolumeRequest:
				_, err = server{}.ResizeVolume(ctx, in)
			case *vmv1.RegisterExternalVolumeRequest:
				_, err = server{}.RegisterExternalVolume(ctx, in)
			}
			f, ok := fault.From(err)
			require.True(t, ok && f.Kind == c.kind, "%v", err)
			require.Equal(t, c.field, f.Field)
		})
	}
}

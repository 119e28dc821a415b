package volume

import (
	"context"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/apply"
	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/flagfile"
	"github.com/trivet-cloud/trivet/cli/session"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// Kind describes volumes for `trivet apply`.
func Kind() *apply.Kind {
	return &apply.Kind{
		Names: []string{"volume"},
		File: &flagfile.File{
			Argument: "name", Aliases: map[string]string{"labels": "label"}, Pairs: []string{"label", "metadata"},
		},
		New: func(s *session.Session) (*cobra.Command, apply.PlanFunc) {
			f, c := &createFlags{}, &cobra.Command{Use: "volume"}
			f.register(s, c)
			return c, func(ctx context.Context, conn *dial.Conn, _ *apply.Run, name string) (*apply.Plan, error) {
				return f.plan(ctx, s, conn, name)
			}
		},
	}
}

// plan compares the volume that the flags describe with the volume of this name.
func (f *createFlags) plan(ctx context.Context, s *session.Session, conn *dial.Conn, name string) (*apply.Plan, error) {
	want, err := f.request(name)
	if err != nil {
		return nil, err
	}
	volumes, err := named(ctx, s, conn, name)
	if err != nil {
		return nil, err
	}
	if len(volumes) == 0 {
		return &apply.Plan{Create: true, Do: func(ctx context.Context) error {
			_, err := f.create(ctx, s, conn, name)
			return err
		}}, nil
	}
	if _, err := one(s, name, volumes); err != nil {
		return nil, err
	}
	return compare(conn, volumes[0], want)
}

// compare returns the plan that makes a volume as want describes it.
func compare(conn *dial.Conn, v *vmv1.Volume, want *vmv1.CreateVolumeRequest) (*apply.Plan, error) {
	if want.GetStorageClass() != "" && want.GetStorageClass() != v.GetStorageClass() {
		return nil, apply.Fixed("class", v.GetStorageClass(), want.GetStorageClass())
	}
	if want.GetSizeGib() != 0 && want.GetSizeGib() < v.GetSizeGib() {
		return nil, session.Errorf(codes.FailedPrecondition, "",
			"size cannot become smaller: it is %d GiB, and the file gives %d GiB", v.GetSizeGib(), want.GetSizeGib())
	}
	plan := &apply.Plan{}
	if want.GetSizeGib() > v.GetSizeGib() {
		plan.Add("size %d -> %d GiB", v.GetSizeGib(), want.GetSizeGib())
	}
	pairs := &storagev1.UpdateVolumeRequest{
		OrgId: v.GetOrgId(), ProjectId: v.GetProjectId(), VolumeId: v.GetId(),
		Labels:   plan.Pairs("label", want.GetLabels(), v.GetLabels(), true),
		Metadata: plan.Pairs("metadata", want.GetMetadata(), v.GetMetadata(), false),
	}
	plan.Do = func(ctx context.Context) error {
		if want.GetSizeGib() > v.GetSizeGib() {
			if _, err := vmv1.NewVolumeServiceClient(conn).ResizeVolume(ctx, &vmv1.ResizeVolumeRequest{
				OrgId: v.GetOrgId(), ProjectId: v.GetProjectId(), VolumeId: v.GetId(), SizeGib: want.GetSizeGib(),
			}); err != nil {
				return err
			}
		}
		if len(pairs.GetLabels()) == 0 && len(pairs.GetMetadata()) == 0 {
			return nil
		}
		_, err := storagev1.NewVolumeServiceClient(conn).UpdateVolume(ctx, pairs)
		return err
	}
	return plan, nil
}

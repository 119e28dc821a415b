package volume

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func registerCommand(s *session.Session) *cobra.Command {
	req, rbd := &vmv1.RegisterExternalVolumeRequest{}, &vmv1.RbdBacking{}
	var size string
	var labels, metadata []string
	c := &cobra.Command{
		Use: "register NAME", Short: "Make an existing RBD image a volume", Args: session.Exactly("NAME"),
		Long: `Make an existing RBD image of a Ceph cluster a volume of the project. This requires the role system:admin. The
image must be in the Ceph pool of the storage class, must have a size of whole GiB and the feature exclusive-lock, and
no client may have it open. A host checks this. The volume is PENDING until then, and ERROR if the check fails.

While a VM has the volume, no other program may open the image. ` + "`trivet volume delete`" + ` keeps the image.`,
		Example: `  trivet volume register data --image old-data --size 100 --class ceph`,
	}
	p := c.Flags()
	p.StringVar(&rbd.Image, "image", "", "name of the RBD image")
	p.StringVar(&size, "size", "", "size of the RBD image in GiB, or with a unit: 2TiB")
	p.StringVar(&req.StorageClass, "class", "", "storage class (default: the default class)")
	p.StringVar(&rbd.Pool, "pool", "", "Ceph pool, which must be the pool of the class (default: the pool of the class)")
	p.StringVar(&rbd.ClusterId, "fsid", "", "ID of the Ceph cluster, which must be the cluster of the class (default: the cluster of the class)")
	p.StringArrayVar(&labels, "label", nil, "KEY=VALUE, repeatable")
	p.StringArrayVar(&metadata, "metadata", nil, "KEY=VALUE, repeatable")
	session.Require(c, "image", "size")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) (err error) {
		if err := cloud.CheckName("NAME", args[0]); err != nil {
			return session.Usagef("%v", err)
		}
		req.Name, req.Rbd = args[0], rbd
		if req.SizeGib, err = ParseSize(size); err != nil {
			return err
		}
		if req.Labels, err = session.Pairs("label", labels); err != nil {
			return err
		}
		if req.Metadata, err = session.Pairs("metadata", metadata); err != nil {
			return err
		}
		req.OrgId, req.ProjectId = s.Tenant()
		v, err := vmv1.NewVolumeServiceClient(conn).RegisterExternalVolume(ctx, req)
		if err != nil {
			return err
		}
		return listed(s).PrintOne(ctx, s, conn, v)
	})
	return c
}

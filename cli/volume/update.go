package volume

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func updateCommand(s *session.Session) *cobra.Command {
	var name string
	var labels, metadata []string
	c := argCommand(s, "update VOLUME", "Change the name, the labels and the metadata of a volume")
	c.Long = `Change the name, the labels and the metadata of a volume, also while a VM uses it. Pairs that are not given stay. An
empty value removes a pair.`
	c.Example = "  trivet volume update data --name archive --label env=prod --label old="
	c.Flags().StringVar(&name, "name", "", "new name")
	c.Flags().StringArrayVar(&labels, "label", nil, "KEY=VALUE, or KEY= to remove the label, repeatable")
	c.Flags().StringArrayVar(&metadata, "metadata", nil, "KEY=VALUE, or KEY= to remove the pair, repeatable")
	session.RequireOne(c, "name", "label", "metadata")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) (err error) {
		req := &storagev1.UpdateVolumeRequest{Name: name}
		if c.Flags().Changed("name") {
			if err := cloud.CheckName("--name", name); err != nil {
				return session.Usagef("%v", err)
			}
		}
		if req.Labels, err = session.Pairs("label", labels); err != nil {
			return err
		}
		if req.Metadata, err = session.Pairs("metadata", metadata); err != nil {
			return err
		}
		if req.VolumeId, err = Find(ctx, s, conn, args[0]); err != nil {
			return err
		}
		req.OrgId, req.ProjectId = s.Tenant()
		v, err := storagev1.NewVolumeServiceClient(conn).UpdateVolume(ctx, req)
		if err != nil {
			return err
		}
		return listed(s).PrintOne(ctx, s, conn, v)
	})
	return c
}

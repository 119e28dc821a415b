package volume

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// flattenTimeout is the deadline of `trivet volume flatten --wait`, unless --timeout is given.
	flattenTimeout = 12 * time.Hour
	// flattenPoll is the interval at which awaitFlattened reads the volume.
	flattenPoll = time.Second
)

func flattenCommand(s *session.Session) *cobra.Command {
	var wait session.Waiting
	c := argCommand(s, "flatten VOLUME", "Make a volume independent of its image")
	c.Long = `Make a volume independent of the image that it was made from, so that the image can be deleted. The
volume's host copies the content of the image into the volume, even while a VM uses the volume. A volume that was never
attached is flattened after its first attachment. An encrypted volume is flattened only while a VM runs with it. With
--wait the command shows the progress.`
	c.Example = "  trivet volume flatten root --wait\n  trivet image delete debian"
	wait.Add(c, false)
	c.RunE = s.Run(flattenTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		call, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		id, err := Find(call, s, conn, args[0])
		if err != nil {
			return err
		}
		org, project := s.Tenant()
		v, err := storagev1.NewVolumeServiceClient(conn).FlattenVolume(call, &storagev1.FlattenVolumeRequest{
			OrgId: org, ProjectId: project, VolumeId: id,
		})
		if err == nil && wait.On() {
			v, err = awaitFlattened(ctx, s, conn, v)
		}
		if err != nil {
			return err
		}
		return listed(s).PrintOne(ctx, s, conn, v)
	})
	return c
}

// awaitFlattened waits until a volume is flattened, and returns the flattened volume. It shows the progress while it
// waits.
func awaitFlattened(ctx context.Context, s *session.Session, conn *dial.Conn, v *vmv1.Volume) (*vmv1.Volume, error) {
	client := vmv1.NewVolumeServiceClient(conn)
	goesOn := session.Ongoing{What: "the host continues", Look: "trivet volume show " + v.GetName()}
	err := s.WaitOngoing("flattening "+v.GetName(), goesOn, func(say func(string)) error {
		for {
			percent, busy := v.GetMetadata()[cloud.VolumeFlatten]
			if !busy {
				return nil
			}
			text := fmt.Sprintf("flattening %s: %s %%", v.GetName(), percent)
			switch why := v.GetMetadata()[cloud.VolumeReason]; {
			case why != "":
				text += ", " + why
			case v.GetAttachedToNode() == "":
				text += ", starts when the volume is attached"
			}
			say(text)
			if err := dial.Sleep(ctx, flattenPoll); err != nil {
				return fmt.Errorf("volume %s is not flattened yet: %w", v.GetName(), err)
			}
			var err error
			req := &vmv1.GetVolumeRequest{OrgId: v.GetOrgId(), ProjectId: v.GetProjectId(), VolumeId: v.GetId()}
			if v, err = client.GetVolume(ctx, req); err != nil {
				return err
			}
		}
	})
	return v, err
}

package image

import (
	"context"
	"fmt"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// FindSnapshot returns the ID of the snapshot of the project with a name or ID. It makes no call for an ID. An
// operator can name a snapshot of any project by its ID. FindSnapshot is in this package because package volume, which
// has the commands for snapshots, imports this one.
func FindSnapshot(ctx context.Context, s *session.Session, conn *dial.Conn, nameOrID string) (string, error) {
	if session.IsID(nameOrID) {
		s.LookUpByID(func() (org, project string, err error) {
			all, _, err := session.Pages(0, func(token string) ([]*storagev1.Snapshot, string, error) {
				page, err := storagev1.NewSnapshotServiceClient(conn).ListAllSnapshots(ctx, &storagev1.ListAllSnapshotsRequest{
					PageSize: session.PageSize, PageToken: token,
				})
				return page.GetSnapshots(), page.GetNextPageToken(), err
			})
			one, err := session.WithID("snapshot", nameOrID, all, err)
			return one.GetOrgId(), one.GetProjectId(), err
		})
		return nameOrID, nil
	}
	if err := cloud.CheckName("snapshot", nameOrID); err != nil {
		return "", session.Usagef("%q is not a valid name or ID of a snapshot", nameOrID)
	}
	org, project := s.Tenant()
	all, _, err := session.Pages(0, func(token string) ([]*storagev1.Snapshot, string, error) {
		page, err := storagev1.NewSnapshotServiceClient(conn).ListSnapshots(ctx, &storagev1.ListSnapshotsRequest{
			OrgId: org, ProjectId: project, PageSize: session.PageSize, PageToken: token,
		})
		return page.GetSnapshots(), page.GetNextPageToken(), err
	})
	if err != nil {
		return "", err
	}
	var matches []session.Match
	for _, one := range all {
		if one.GetName() == nameOrID {
			about := fmt.Sprintf("%s of volume %s", show.Enum("SNAPSHOT_STATUS", one.GetStatus()), one.GetVolumeId())
			matches = append(matches, session.Match{ID: one.GetId(), About: about})
		}
	}
	return session.One("snapshot", s.Scope(), nameOrID, matches)
}

package session

import (
	"context"

	"github.com/trivet-cloud/trivet/cli/dial"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// CheckTenant returns a NOT_FOUND error if the flags or the environment name an org or a project that does not exist, or
// in which the caller has no role. It makes no call if they name neither.
func (s *Session) CheckTenant(ctx context.Context, conn *dial.Conn) error {
	org, project := s.Named()
	client := identityv1.NewIdentityServiceClient(conn)
	if project != "" {
		p, err := client.GetProject(ctx, &identityv1.GetProjectRequest{Id: project})
		if err != nil {
			return err
		}
		if org != "" && p.GetOrgId() != org {
			return NotFound("`trivet project list` shows the existing ones", "no project %s in org %s", project, org)
		}
		return nil
	}
	if org != "" {
		_, err := client.GetOrg(ctx, &identityv1.GetOrgRequest{Id: org})
		return err
	}
	return nil
}

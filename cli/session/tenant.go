package session

import (
	"context"
	"slices"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/explain"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// CheckTenant returns a NOT_FOUND error if the flags or the environment name an org or a project that does not exist, or
// in which the caller has no role. It makes no call if they name neither.
func (s *Session) CheckTenant(ctx context.Context, conn *dial.Conn) error {
	org, project := s.Named()
	return CheckTenant(ctx, conn, org, project)
}

// CheckTenant returns a NOT_FOUND error if the org or the project does not exist, if the caller has no role in it, or if
// the project is in another org. It makes no call if both are empty.
func CheckTenant(ctx context.Context, conn *dial.Conn, org, project string) error {
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

// inTenant calls body. If the control plane requires an org or a project that the command does not name, it calls body
// again for the tenant that the command must mean: the project of the object, if body has called LookUpByID, or else the
// only org and the only project that the caller can mean. It returns the error of the first call if there are several.
// It is safe to call body again: a call that fails because it names no tenant has changed nothing.
func (s *Session) inTenant(ctx context.Context, body func() error) error {
	s.found.org, s.found.project, s.lookUp = "", "", nil
	err := body()
	find := s.lookUp
	s.lookUp = nil
	if find != nil && explain.TenantMissing(err) {
		if s.found.org, s.found.project, err = find(); err != nil {
			return err
		}
		return body()
	}
	for range 2 { // the org first, and then the project if it is required too
		if !explain.TenantRequired(err) || !s.findOnlyTenant(ctx) {
			return err
		}
		err = body()
	}
	return err
}

// findOnlyTenant sets the org of s.found to the only org in which the caller has a role, and the project to the only one
// in which the caller has one. If the command names the org, or an earlier call has set it, findOnlyTenant sets the
// project to the only one of the org that the caller can see. It returns false if there are several, or if the command
// names a project.
func (s *Session) findOnlyTenant(ctx context.Context) bool {
	org, project := s.Tenant()
	if s.conn == nil || !s.choosing || project != "" {
		return false
	}
	client := identityv1.NewIdentityServiceClient(s.conn)
	if org == "" {
		me, err := client.WhoAmI(ctx, &identityv1.WhoAmIRequest{})
		if err != nil {
			return false
		}
		org, project = onlyTenant(me.GetBindings())
	} else {
		page, err := client.ListProjects(ctx, &identityv1.ListProjectsRequest{OrgId: org, PageSize: 2})
		if err != nil || len(page.GetProjects()) != 1 {
			return false
		}
		project = page.GetProjects()[0].GetId()
	}
	if org == "" {
		return false
	}
	s.found.org, s.found.project = org, project
	s.conn.ActIn(org, project)
	return true
}

// onlyTenant returns the only org of roles, without a project if one of the roles is for the whole org, and otherwise
// with the only project. It returns "" for roles in several orgs, and for roles in several projects and in no whole org.
func onlyTenant(roles []*identityv1.Binding) (org, project string) {
	whole := slices.ContainsFunc(roles, func(b *identityv1.Binding) bool { return b.GetProjectId() == "" })
	for i, b := range roles {
		if b.GetOrgId() == "" || i > 0 && (b.GetOrgId() != org || !whole && b.GetProjectId() != project) {
			return "", ""
		}
		org = b.GetOrgId()
		if !whole {
			project = b.GetProjectId()
		}
	}
	return org, project
}

package identity

import (
	"context"

	"google.golang.org/protobuf/types/known/emptypb"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func (r *server) CreateOrg(ctx context.Context, in *identityv1.CreateOrgRequest) (*identityv1.Org, error) {
	if err := admit(ctx, "CreateOrg"); err != nil {
		return nil, err
	}
	o, err := createOrgCommand.Call(ctx, r.s.opts.Commands, newOrg{cloud.OrgID(in.GetId()), in.GetName()})
	if err != nil {
		return nil, err
	}
	return orgOnWire(&o), nil
}

func (r *server) GetOrg(ctx context.Context, in *identityv1.GetOrgRequest) (*identityv1.Org, error) {
	if err := admit(ctx, "GetOrg"); err != nil {
		return nil, err
	}
	if err := cloud.CheckCallerID("id", in.GetId()); err != nil {
		return nil, err
	}
	return r.org(ctx, cloud.OrgID(in.GetId()))
}

func (r *server) ListOrgs(ctx context.Context, in *identityv1.ListOrgsRequest) (*identityv1.ListOrgsResponse, error) {
	if err := admit(ctx, "ListOrgs"); err != nil {
		return nil, err
	}
	list, next, err := r.s.orgs(ctx, auth.CallerOf(ctx), in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &identityv1.ListOrgsResponse{NextPageToken: next}
	for _, o := range list {
		out.Orgs = append(out.Orgs, orgOnWire(o))
	}
	return out, nil
}

func (r *server) UpdateOrg(ctx context.Context, in *identityv1.UpdateOrgRequest) (*identityv1.Org, error) {
	if _, err := auth.Admit(ctx, service+"UpdateOrg", in.GetId(), ""); err != nil {
		return nil, err
	}
	// Without an ID, Admit has authorized the org of the metadata or of the token.
	if err := cloud.CheckCallerID("id", in.GetId()); err != nil {
		return nil, err
	}
	if in.Name == nil {
		return r.org(ctx, cloud.OrgID(in.GetId()))
	}
	o, err := renameOrgCommand.Call(ctx, r.s.opts.Commands, newDisplayName[cloud.OrgID]{cloud.OrgID(in.GetId()), in.GetName()})
	if err != nil {
		return nil, err
	}
	return orgOnWire(&o), nil
}

func (r *server) org(ctx context.Context, id cloud.OrgID) (*identityv1.Org, error) {
	o, err := r.s.org(ctx, auth.CallerOf(ctx), id)
	if err != nil {
		return nil, err
	}
	return orgOnWire(o), nil
}

func (r *server) DeleteOrg(ctx context.Context, in *identityv1.DeleteOrgRequest) (*emptypb.Empty, error) {
	if err := admit(ctx, "DeleteOrg"); err != nil {
		return nil, err
	}
	if err := cloud.CheckCallerID("id", in.GetId()); err != nil {
		return nil, err
	}
	if _, err := deleteOrgCommand.Call(ctx, r.s.opts.Commands, cloud.OrgID(in.GetId())); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

func (r *server) CreateProject(ctx context.Context, in *identityv1.CreateProjectRequest) (*identityv1.Project, error) {
	at, err := auth.Admit(ctx, service+"CreateProject", in.GetOrgId(), "")
	if err != nil {
		return nil, err
	}
	at.Project = cloud.ProjectID(in.GetId())
	p, err := createProjectCommand.Call(ctx, r.s.opts.Commands, newProject{
		Tenant: at, Name: in.GetName(), Quota: quotaOf(in.GetQuota()), AnyQuota: auth.CallerOf(ctx).Has(cloud.SystemAdmin, cloud.Tenant{}),
	})
	if err != nil {
		return nil, err
	}
	return projectOnWire(&p), nil
}

func (r *server) GetProject(ctx context.Context, in *identityv1.GetProjectRequest) (*identityv1.Project, error) {
	if err := admit(ctx, "GetProject"); err != nil {
		return nil, err
	}
	if err := cloud.CheckCallerID("id", in.GetId()); err != nil {
		return nil, err
	}
	return r.project(ctx, cloud.Tenant{Project: cloud.ProjectID(in.GetId())})
}

func (r *server) ListProjects(ctx context.Context, in *identityv1.ListProjectsRequest) (*identityv1.ListProjectsResponse, error) {
	if err := admit(ctx, "ListProjects"); err != nil {
		return nil, err
	}
	org := cloud.OrgID(in.GetOrgId())
	if org != "" {
		if err := cloud.CheckCallerID("org_id", string(org)); err != nil {
			return nil, err
		}
	}
	list, next, err := r.s.projects(ctx, auth.CallerOf(ctx), org, in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &identityv1.ListProjectsResponse{NextPageToken: next}
	for _, p := range list {
		out.Projects = append(out.Projects, projectOnWire(p))
	}
	return out, nil
}

func (r *server) UpdateProject(ctx context.Context, in *identityv1.UpdateProjectRequest) (*identityv1.Project, error) {
	at, err := auth.Admit(ctx, service+"UpdateProject", in.GetOrgId(), "")
	if err != nil {
		return nil, err
	}
	if err := cloud.CheckCallerID("id", in.GetId()); err != nil {
		return nil, err
	}
	at.Project = cloud.ProjectID(in.GetId())
	if in.Name == nil {
		return r.project(ctx, at)
	}
	p, err := renameProjectCommand.Call(ctx, r.s.opts.Commands, newProjectName{at, in.GetName()})
	if err != nil {
		return nil, err
	}
	return projectOnWire(&p), nil
}

// project returns a project in which the caller has a role. If t names an org, the project must belong to that org.
func (r *server) project(ctx context.Context, t cloud.Tenant) (*identityv1.Project, error) {
	p, err := r.s.project(ctx, auth.CallerOf(ctx), t.Project)
	if err != nil {
		return nil, err
	}
	if t.Org != "" && p.Org != t.Org {
		return nil, tenant.NoProject(t.Project)
	}
	return projectOnWire(p), nil
}

func (r *server) DeleteProject(ctx context.Context, in *identityv1.DeleteProjectRequest) (*emptypb.Empty, error) {
	at, err := auth.Admit(ctx, service+"DeleteProject", in.GetOrgId(), "")
	if err != nil {
		return nil, err
	}
	if err := cloud.CheckCallerID("id", in.GetId()); err != nil {
		return nil, err
	}
	at.Project = cloud.ProjectID(in.GetId())
	if _, err := deleteProjectCommand.Call(ctx, r.s.opts.Commands, at); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

func orgOnWire(o *tenant.Org) *identityv1.Org {
	return &identityv1.Org{Id: string(o.ID), Name: o.Name, CreatedAt: o.CreatedAt}
}

func projectOnWire(p *tenant.Project) *identityv1.Project {
	return &identityv1.Project{Id: string(p.ID), OrgId: string(p.Org), Name: p.Name, CreatedAt: p.CreatedAt}
}

package identity

import (
	"context"
	"iter"
	"slices"
	"strings"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// holder returns what WhoAmI and VerifyToken respond about a verified caller. For an unauthenticated caller it reads no
// stored records.
func (s *Service) holder(ctx context.Context, c *cloud.Caller) (*identityv1.WhoAmIResponse, error) {
	out := &identityv1.WhoAmIResponse{
		PrincipalId: string(c.User), PrincipalName: string(c.User), Kind: string(principal.Person), Proof: string(c.Proof),
		OrgId: string(c.Scope.Org), ProjectId: string(c.Scope.Project), Bindings: bindingsOnWire(c.Bindings), ExpiresAt: c.Expires, TokenId: c.TokenID,
	}
	// Read no records, because an unauthenticated caller must not learn whether a user with this name exists.
	if !c.Authenticated() || c.Proof == cloud.ProofDev {
		return out, nil
	}
	var u *principal.User
	err := s.opts.Store.Recent(ctx, staleness, func(v *store.View) (err error) {
		if u, err = principal.Users.Get(v, string(c.User)); err == nil && u != nil {
			out.Groups, err = groupsOf(v, u)
		}
		return err
	})
	if err == nil && u != nil {
		out.Kind = string(u.Kind())
		if u.Name != "" {
			out.PrincipalName = u.Name
		}
		out.HomeOrgId = string(u.HomeOrg())
		if at, ok := cloud.Prefer(cloud.ProjectsOf(c.Bindings, ""), c.Defaults.Project); ok {
			out.DefaultOrgId, out.DefaultProjectId = string(at.Org), string(at.Project)
		}
	}
	return out, err
}

// user returns the principal with the given ID. The result includes every change acknowledged before the call.
func (s *Service) user(ctx context.Context, id cloud.UserID) (u *principal.User, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		if u, err = principal.Find(v, id); err == nil {
			u.Bindings, err = alive(v, u.Bindings)
		}
		return err
	})
	return u, err
}

// users returns a page of all principals.
func (s *Service) users(ctx context.Context, size int32, page string) ([]*principal.User, string, error) {
	all := func(*principal.User) bool { return true }
	list, next, err := store.Page(ctx, s.opts.Store, principal.Users, store.PageRequest{Size: size, Token: page, Query: "users"}, all)
	if err != nil {
		return nil, "", err
	}
	list, err = s.current(list)
	return list, next, err
}

// bound returns a page of the principals that have roles in the org or project given by the parameter at.
func (s *Service) bound(ctx context.Context, at cloud.Tenant, size int32, page string) ([]*principal.User, string, error) {
	req := store.PageRequest{Size: size, Token: page, Query: "bindings\x00" + at.String()}
	list, next, err := store.Page(ctx, s.opts.Store, principal.Users, req, func(u *principal.User) bool { return len(u.At(at)) > 0 })
	if err != nil {
		return nil, "", err
	}
	list, err = s.current(list)
	return list, next, err
}

// accounts returns a page of a project's service accounts.
func (s *Service) accounts(ctx context.Context, at cloud.Tenant, size int32, page string) ([]*principal.User, string, error) {
	return principal.Accounts(ctx, s.opts.Store, at, size, page)
}

// account returns the service account of the project at with an ID, or NotFound.
func (s *Service) account(ctx context.Context, at cloud.Tenant, id cloud.UserID) (u *principal.User, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		u, err = principal.AccountOf(v, at, id)
		return err
	})
	return u, err
}

// usernames returns the names with their projects, NAME@ORG/PROJECT, of those of the IDs that are service accounts at
// present.
func (s *Service) usernames(ids iter.Seq[string]) (map[string]string, error) {
	found := map[string]string{}
	err := s.opts.Store.Local(func(v *store.View) error {
		for id := range ids {
			if _, known := found[id]; known || !strings.HasPrefix(id, principal.AccountPrefix) {
				continue
			}
			u, err := principal.Users.Get(v, id)
			if err != nil {
				return err
			}
			found[id] = ""
			if u != nil && u.Account != nil {
				found[id] = u.Account.Username()
			}
		}
		return nil
	})
	return found, err
}

// canSee reports whether the caller c has a role in an org. If project is not empty, it reports whether c has a role in
// that project of the org.
func canSee(c *cloud.Caller, org cloud.OrgID, project cloud.ProjectID) bool {
	if c.Scope.Org != "" && c.Scope.Org != org || c.Scope.Project != "" && project != "" && c.Scope.Project != project {
		return false
	}
	return c.Has(cloud.SystemAdmin, cloud.Tenant{}) || c.Has(cloud.BillingAdmin, cloud.Tenant{}) ||
		slices.ContainsFunc(c.Bindings, func(b cloud.Binding) bool {
			return b.Org == org && (project == "" || b.Project == "" || b.Project == project)
		})
}

// org returns an org in which the caller has a role, or NotFound.
func (s *Service) org(ctx context.Context, c *cloud.Caller, id cloud.OrgID) (o *tenant.Org, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		if o, err = tenant.FindOrg(v, id); err == nil && (o == nil || !canSee(c, id, "")) {
			err = tenant.NoOrg(id)
		}
		return err
	})
	return o, err
}

// orgs returns a page of the orgs in which the caller has a role.
func (s *Service) orgs(ctx context.Context, c *cloud.Caller, size int32, page string) ([]*tenant.Org, string, error) {
	req := store.PageRequest{Size: size, Token: page, Query: "orgs\x00" + c.Name()}
	return store.Page(ctx, s.opts.Store, tenant.Orgs, req, func(o *tenant.Org) bool { return o.DeletedAt == 0 && canSee(c, o.ID, "") })
}

// project returns a project in which the caller has a role, or NotFound.
func (s *Service) project(ctx context.Context, c *cloud.Caller, id cloud.ProjectID) (p *tenant.Project, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		if p, err = tenant.Find(v, id); err == nil && (p == nil || !canSee(c, p.Org, id)) {
			err = tenant.NoProject(id)
		}
		return err
	})
	return p, err
}

// projects returns a page of the projects in which the caller has a role. If org is not empty, it returns only projects
// of that org.
func (s *Service) projects(ctx context.Context, c *cloud.Caller, org cloud.OrgID, size int32, page string) ([]*tenant.Project, string, error) {
	keep := func(p *tenant.Project) bool {
		return p.DeletedAt == 0 && (org == "" || p.Org == org) && canSee(c, p.Org, p.ID)
	}
	req := store.PageRequest{Size: size, Token: page, Query: "projects\x00" + c.Name() + "\x00" + string(org)}
	return store.Page(ctx, s.opts.Store, tenant.Projects, req, keep)
}

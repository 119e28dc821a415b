package identity

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// A project that is created again under the ID of a deleted one is another incarnation (see package tenant). Tokens and
// bindings carry the incarnation of their project. Comparing their time of issue with the project's creation would
// depend on the members' clocks.

// setIncarnation sets the claim with the incarnation of the project that a token is scoped to. A token scoped to a
// project that does not exist is valid for no later project of the same ID.
func (s *Service) setIncarnation(ctx context.Context, c *token.Claims) error {
	scope, ok := c.Tenant()
	if !ok || scope.Project == "" || c.Proof == cloud.ProofNone {
		return nil
	}
	return s.opts.Store.Recent(ctx, staleness, func(v *store.View) error {
		p, err := tenant.Find(v, scope.Project)
		if err == nil && p != nil {
			c.Incarnation = p.Incarnation
		}
		return err
	})
}

// actsIn reports whether a token with these claims is valid for p, the project of its scope: p must have the
// incarnation that the token was issued for. A token signed with the host key was issued without reading records; it is
// valid for projects created before it.
func actsIn(c *token.Claims, p *tenant.Project) bool {
	if c.Proof == cloud.ProofHostKey {
		return c.At >= cloud.Time(p.Incarnation)
	}
	return c.Incarnation == p.Incarnation
}

// current returns principals without the bindings whose org or project was deleted.
func (s *Service) current(list []*principal.User) ([]*principal.User, error) {
	return list, s.opts.Store.Local(func(v *store.View) (err error) {
		for _, u := range list {
			if u.Bindings, err = alive(v, u.Bindings); err != nil {
				return err
			}
		}
		return nil
	})
}

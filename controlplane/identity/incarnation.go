package identity

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/controlplane/tenant"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// A project that is created again under the ID of a deleted one is another incarnation (see package tenant). Tokens and
// bindings carry the incarnation of their project, because what is compared by times of issue would depend on members'
// clocks.

// setIncarnation sets the incarnation of the project that a token is scoped to. A token that is scoped to a project which
// does not exist never acts in one.
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

// actsIn reports whether a token of these claims may act in a project of its scope: in the incarnation that it was issued
// for. A token that the cluster key signed was made without reading records: it acts in projects older than itself.
func actsIn(c *token.Claims, p *tenant.Project) bool {
	if c.Proof == cloud.ProofHostKey {
		return c.At >= cloud.Time(p.Incarnation)
	}
	return c.Incarnation == p.Incarnation
}

// current removes from principals the bindings that give nothing any more, because their org or project was deleted.
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

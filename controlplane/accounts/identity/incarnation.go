package identity

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// If a project is deleted and created again with the same ID, the new project is another incarnation (see package
// tenant). Tokens and bindings contain the incarnation of their project, so that they are not valid for the new
// project. Comparing creation times instead would depend on the members' clocks.

// setIncarnation sets the ID and the incarnation claim of an authenticated token whose scope is a project. It leaves
// other tokens unchanged. If the project does not exist, the token is not valid for a project that is created later
// with the same ID.
func (s *Service) setIncarnation(ctx context.Context, c *token.Claims) error {
	scope, ok := c.Tenant()
	if !ok || scope.Project == "" || c.Proof == cloud.ProofNone {
		return nil
	}
	return s.opts.Store.Recent(ctx, staleness, func(v *store.View) error {
		p, err := tenant.Find(v, scope.Project)
		if err != nil {
			return err
		}
		var i cloud.Incarnation
		if p != nil {
			i = p.Incarnation
		}
		c.ID = uuid.NewString()
		c.Incarnation = s.incarnationClaim(c.ID, scope.Project, i)
		return nil
	})
}

// incarnationClaim returns the "incarnation" claim of a token whose scope is the project id. The parameter i is the
// incarnation of the project, or 0 if the project does not exist. The claim is a MAC that differs for each token. So a
// holder without a role in the project cannot learn from the token whether the project exists or when it was created.
func (s *Service) incarnationClaim(tokenID string, id cloud.ProjectID, i cloud.Incarnation) string {
	mac := hmac.New(sha256.New, s.incarnationKey)
	fmt.Fprintf(mac, "%s\n%s\n%d", tokenID, id, i)
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil)[:16])
}

// actsIn reports whether a token with the claims c is valid for the project p of its scope:
//   - Normally the incarnation in the token must be that of p.
//   - A token signed with the host key contains no incarnation, because it was issued without reading records. It is
//     valid if p was created before the token was issued.
//   - A token of a version without incarnations is valid if p was created by such a version.
func (s *Service) actsIn(c *token.Claims, p *tenant.Project) bool {
	switch {
	case c.Proof == cloud.ProofHostKey:
		return c.At >= cloud.Time(p.Incarnation)
	case c.Incarnation == "":
		return p.Incarnation == 0
	}
	return hmac.Equal([]byte(c.Incarnation), []byte(s.incarnationClaim(c.ID, p.ID, p.Incarnation)))
}

// current removes the bindings whose org or project was deleted from each principal in the list, and returns the list.
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

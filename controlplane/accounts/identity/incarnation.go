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

// A project that is created again under the ID of a deleted one is another incarnation (see package tenant). Tokens and
// bindings carry the incarnation of their project. Times are not compared instead, because that would depend on the
// members' clocks.

// setIncarnation sets the ID and the incarnation claim of an authenticated token that is scoped to a project. Other
// tokens stay unchanged. If the project does not exist, the token is valid for no later project of the same ID.
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

// incarnationClaim returns the "incarnation" claim of a token for the incarnation i of a project; i is 0 if the project
// does not exist. The token is also issued to a user without a role in the project, and its holder can read it. So the
// claim is a MAC that differs for each token: it reveals neither whether the project exists nor when it was created.
func (s *Service) incarnationClaim(tokenID string, id cloud.ProjectID, i cloud.Incarnation) string {
	mac := hmac.New(sha256.New, s.incarnationKey)
	fmt.Fprintf(mac, "%s\n%s\n%d", tokenID, id, i)
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil)[:16])
}

// actsIn reports whether a token with these claims is valid for p, the project of its scope: p must have the
// incarnation that the token was issued for. A token signed with the host key was issued without reading records; it is
// valid for projects created before it. A token of a version without incarnations is valid for a project of such a
// version.
func (s *Service) actsIn(c *token.Claims, p *tenant.Project) bool {
	switch {
	case c.Proof == cloud.ProofHostKey:
		return c.At >= cloud.Time(p.Incarnation)
	case c.Incarnation == "":
		return p.Incarnation == 0
	}
	return hmac.Equal([]byte(c.Incarnation), []byte(s.incarnationClaim(c.ID, p.ID, p.Incarnation)))
}

// current removes from each principal in the list the bindings whose org or project was deleted, and returns the list.
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

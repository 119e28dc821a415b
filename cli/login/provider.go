package login

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/openid"
	"github.com/trivet-cloud/trivet/cli/session"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// browserTimeout is the time in which a person must log in with the browser, unless --timeout is given.
const browserTimeout = 5 * time.Minute

// atProvider lets the user log in at the OpenID provider l.Provider with a browser, exchanges the ID token for a token
// of the cloud, and sets l.User to the holder of that token.
func (a *loginFlags) atProvider(ctx context.Context, s *session.Session, client identityv1.IdentityServiceClient, l *account.Login) (*identityv1.IssueTokenResponse, error) {
	ctx, cancel := s.Limit(ctx, browserTimeout)
	defer cancel()
	provider, err := findProvider(ctx, client, l.Provider)
	if err != nil {
		return nil, err
	}
	proof, err := openid.Prove(ctx, openid.Provider{Issuer: provider.GetIssuer(), ClientID: provider.GetClientId(), Scopes: provider.GetScopes()},
		openid.Options{Port: a.port, Now: s.Now, Show: func(address string) {
			s.Note("open this address in a browser of this host, and log in there:")
			fmt.Fprintf(s.Stderr, "\n  %s\n\n", address)
		}})
	if err != nil {
		return nil, err
	}
	s.Keep(proof.IDToken)
	token, err := client.ExchangeToken(ctx, &identityv1.ExchangeTokenRequest{
		Provider: l.Provider, IdToken: string(proof.IDToken), Nonce: proof.Nonce, TtlSeconds: uint64(a.ttl / time.Second), OrgId: l.Org, ProjectId: l.Project,
	})
	if err != nil {
		return nil, err
	}
	s.Keep(account.Secret(token.GetToken()))
	v, err := client.VerifyToken(ctx, &identityv1.VerifyTokenRequest{Token: token.GetToken()})
	if err != nil {
		return nil, fmt.Errorf("verify the new token: %w", err)
	}
	if !v.GetValid() {
		return nil, fmt.Errorf("the control plane does not accept the token that it issued: %s", v.GetReason())
	}
	l.User = v.GetHolder().GetPrincipalId()
	return token, nil
}

func findProvider(ctx context.Context, client identityv1.IdentityServiceClient, name string) (*identityv1.LoginProvider, error) {
	all, err := client.ListLoginProviders(ctx, &identityv1.ListLoginProvidersRequest{})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, p := range all.GetProviders() {
		if p.GetName() == name {
			return p, nil
		}
		names = append(names, p.GetName())
	}
	if len(names) == 0 {
		return nil, session.NotFound("log in with --user", "the control plane has no OpenID provider configured")
	}
	return nil, session.NotFound("want one of "+strings.Join(names, ", "), "no provider named %q", name)
}

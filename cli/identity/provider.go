package identity

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// ProviderNames returns a shell completion for a flag, with the names of the cloud's OpenID providers.
func ProviderNames(s *session.Session) cobra.CompletionFunc {
	return s.OpenNames(func(ctx context.Context, conn *dial.Conn) (names []string, err error) {
		all, err := identityv1.NewIdentityServiceClient(conn).ListLoginProviders(ctx, &identityv1.ListLoginProvidersRequest{})
		for _, p := range all.GetProviders() {
			names = append(names, p.GetName())
		}
		return names, err
	})
}

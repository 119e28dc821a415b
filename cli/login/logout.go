package login

import (
	"context"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/identity"
	"github.com/trivet-cloud/trivet/cli/session"
)

// logoutCommand returns the command `trivet logout`.
func logoutCommand(s *session.Session) *cobra.Command {
	var local bool
	c := &cobra.Command{
		Use: "logout", Short: "Revoke the token of a login", Args: session.Exactly(),
		Long: `Revoke the token of the current context, or of --context, and remove it from this host. Copies of the token become
invalid too. The context is kept for the next ` + "`trivet login`" + `.`,
	}
	c.Flags().BoolVar(&local, "local", false, "only remove the token from this host: copies of it stay valid until they expire")
	c.RunE = s.Local(func(ctx context.Context, _ []string) error {
		ctx, cancel := s.Limit(ctx, callTimeout)
		defer cancel()
		path, book, err := s.Book()
		if err != nil {
			return err
		}
		name := s.ContextNamed()
		if name == "" {
			name = book.Current
		}
		l := book.Contexts[name]
		switch {
		case l == nil && s.ContextNamed() != "":
			return session.NoContext(name)
		case l == nil:
			return session.Errorf(codes.Unauthenticated, "run `trivet login`", "you are not logged in")
		}
		if l.Token != "" && !local {
			if err := revokeSaved(ctx, s, l); err != nil {
				s.Note("the login is kept; `trivet logout --local` removes it without calling the control plane")
				return err
			}
		}
		if err := account.Update(ctx, path, func(b *account.Book) error {
			// Do not remove the token if another login has replaced it in the meantime.
			if now := b.Contexts[name]; now != nil && now.Token == l.Token {
				now.Token, now.ExpiresAt = "", time.Time{}
			}
			return nil
		}); err != nil {
			return err
		}
		return s.Done(name, "is logged out")
	})
	return c
}

func revokeSaved(ctx context.Context, s *session.Session, l *account.Login) error {
	conn, err := s.ConnectFor(l)
	if err != nil {
		return err
	}
	defer conn.Close()
	return identity.RevokeToken(ctx, conn, l.Token)
}

package login

import (
	"context"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/session"
)

var errNoCurrentContext = session.Errorf(codes.NotFound, "run `trivet login`, or `trivet context use`", "there is no current context")

// fileLockTimeout is the time that a command waits while another process changes the file of contexts.
const fileLockTimeout = 10 * time.Second

// changeContext returns a function for cobra's RunE that calls body to change the contexts and saves the result. The
// command's first argument names the context, which must exist. done is the text that is printed after the name on
// success.
func changeContext(s *session.Session, body func(b *account.Book, args []string) error, done string) func(*cobra.Command, []string) error {
	return s.Local(func(ctx context.Context, args []string) error {
		ctx, cancel := s.Limit(ctx, fileLockTimeout)
		defer cancel()
		return updateContext(ctx, s, args[0], func(b *account.Book) error { return body(b, args) }, done)
	})
}

// updateContext calls body to change the context with a name, which must exist, and saves the result.
func updateContext(ctx context.Context, s *session.Session, name string, body func(*account.Book) error, done string) error {
	path, err := account.Path(s.Env)
	if err != nil {
		return err
	}
	if err := account.Update(ctx, path, func(b *account.Book) error {
		if b.Contexts[name] == nil {
			return session.NoContext(name)
		}
		return body(b)
	}); err != nil {
		return err
	}
	return s.Done(name, done)
}

func useContextCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{Use: "use NAME", Short: "Make a saved login the current one", Args: session.Exactly("NAME"),
		ValidArgsFunction: session.FirstArg(s.Contexts())}
	c.RunE = changeContext(s, func(b *account.Book, args []string) error {
		b.Current = args[0]
		return nil
	}, "is the current context")
	return c
}

func deleteContextCommand(s *session.Session) *cobra.Command {
	c := session.Many(&cobra.Command{Use: "delete NAME", Short: "Delete a saved login", ValidArgsFunction: s.Contexts(),
		Long: `Delete a saved login. Its token is not revoked: run ` + "`trivet logout`" + ` first for that.`})
	c.RunE = s.Local(func(ctx context.Context, args []string) error {
		return s.Each(ctx, fileLockTimeout, args, func(ctx context.Context, name string) error {
			return updateContext(ctx, s, name, func(b *account.Book) error {
				if l := b.Contexts[name]; l.Token != "" && s.Now().Before(l.ExpiresAt) {
					s.Note("its token was not revoked and is valid until %s", l.ExpiresAt.UTC().Format(time.RFC3339))
				}
				delete(b.Contexts, name)
				if b.Current == name {
					b.Current = ""
				}
				return nil
			}, "is deleted")
		})
	})
	return c
}

func renameContextCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{Use: "rename NAME NEW", Short: "Rename a saved login", Args: session.Exactly("NAME", "NEW"),
		ValidArgsFunction: session.FirstArg(s.Contexts())}
	c.RunE = changeContext(s, func(b *account.Book, args []string) error {
		was, name := args[0], args[1]
		if err := account.CheckContext(name); err != nil {
			return session.Usagef("%v", err)
		}
		if b.Contexts[name] != nil {
			return session.Errorf(codes.AlreadyExists, "", "a context named %q exists already", name)
		}
		b.Contexts[name] = b.Contexts[was]
		delete(b.Contexts, was)
		if b.Current == was {
			b.Current = name
		}
		return nil
	}, "is renamed")
	return c
}

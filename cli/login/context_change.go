package login

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/session"
)

var errNoCurrentContext = errors.New("there is no current context: run `trivet login`, or `trivet context use`")

// fileLockTimeout is the time that a command waits while another process changes the file of contexts.
const fileLockTimeout = 10 * time.Second

// changeContext returns a function for cobra's RunE that calls body to change the contexts and saves the result. The
// command's first argument names the context, which must exist. done is the text that is printed after the name on
// success.
func changeContext(s *session.Session, body func(b *account.Book, args []string) error, done string) func(*cobra.Command, []string) error {
	return s.Local(func(ctx context.Context, args []string) error {
		path, err := account.Path(s.Env)
		if err != nil {
			return err
		}
		ctx, cancel := s.Limit(ctx, fileLockTimeout)
		defer cancel()
		if err := account.Update(ctx, path, func(b *account.Book) error {
			if b.Contexts[args[0]] == nil {
				return session.NoContext(args[0])
			}
			return body(b, args)
		}); err != nil {
			return err
		}
		return s.Done(args[0], done)
	})
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
	c := &cobra.Command{Use: "delete NAME", Short: "Delete a saved login", Args: session.Exactly("NAME"),
		Long: `Delete a saved login. Its token is not revoked: run ` + "`trivet logout`" + ` first for that.`, ValidArgsFunction: session.FirstArg(s.Contexts())}
	c.RunE = changeContext(s, func(b *account.Book, args []string) error {
		if l := b.Contexts[args[0]]; l.Token != "" && s.Now().Before(l.ExpiresAt) {
			s.Note("its token was not revoked and is valid until %s", l.ExpiresAt.UTC().Format(time.RFC3339))
		}
		delete(b.Contexts, args[0])
		if b.Current == args[0] {
			b.Current = ""
		}
		return nil
	}, "is deleted")
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
			return errors.New("a context of that name exists already")
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

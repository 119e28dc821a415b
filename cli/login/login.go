// Package login holds the commands `trivet login`, `trivet logout` and `trivet context`. `trivet login` gets a token
// with a password or through an OpenID provider, and saves it as a context for the other commands. Package account
// reads and writes the file of contexts.
//
// Decision: a login with the same user, provider, endpoints, org and project as a saved context replaces the token of
// that context. Any other login becomes a new context, so that no login overwrites another one, unless --context names
// the context to overwrite.
package login

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/identity"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// Commands returns the commands of this package, which become subcommands of `trivet`.
func Commands(s *session.Session) []*cobra.Command {
	return []*cobra.Command{loginCommand(s), logoutCommand(s), contextCommand(s)}
}

// callTimeout is the deadline of each command unless --timeout is given. The time in which a person types is not
// counted.
const callTimeout = 30 * time.Second

// loginFlags holds the values of the flags of `trivet login`.
type loginFlags struct {
	user, passwordFile string
	provider           string
	port               uint16
	ttl                time.Duration
}

// loginCommand returns the command `trivet login`.
func loginCommand(s *session.Session) *cobra.Command {
	var a loginFlags
	c := &cobra.Command{
		Use:   "login",
		Short: "Get a token and save it for the other commands",
		Long: `Get a token with a user ID and a password, and save it in $XDG_CONFIG_HOME/trivet/config.yaml (mode 0600) for the
other commands, together with --endpoint, the TLS options, --org and --project. The password is asked for, or read
from a file.

With --provider you log in with an OpenID provider: open the printed address in a browser on this host, and log in
there. The provider redirects the browser to a port of this host.

Each login is saved as a context, and one context is the current one: ` + "`trivet context`" + ` lists contexts and switches
between them. When the token has expired, ` + "`trivet login`" + ` without flags gets another one for the same user,
endpoints, org and project. A login as another user, to other endpoints or for another project creates a new
context, named USER/PROJECT@HOST unless --context is given.

With --org or --project the token is valid only there. Without them it is valid wherever you have a role, and each
command selects a project with --org and --project; ` + "`trivet login --org= --project=`" + ` gets such a token again.`,
		Example: `  trivet login --endpoint 10.0.0.1,10.0.0.2,10.0.0.3 --tls-ca tls-ca.crt --user demo --project default
  trivet login --context prod --endpoint 10.0.0.1 --provider corp`,
		Args: session.Exactly(),
	}
	c.Flags().StringVar(&a.user, "user", "", "user ID (default: the context's user, or else ask)")
	identity.PasswordFileFlag(c, &a.passwordFile)
	c.Flags().StringVar(&a.provider, "provider", "", "log in with this OpenID provider")
	c.Flags().Uint16Var(&a.port, "callback-port", 0, "port for the redirect from the provider, if it is registered with a fixed one (default: any)")
	c.Flags().DurationVar(&a.ttl, "ttl", 0, "lifetime of the token (default 1h, at most 720h)")
	_ = c.RegisterFlagCompletionFunc("provider", identity.ProviderNames(s)) // its only error is for an unknown flag
	c.RunE = s.Local(func(ctx context.Context, _ []string) error {
		switch {
		case a.ttl < 0 || a.ttl%time.Second != 0:
			return session.Usagef("--ttl %v: want whole seconds", a.ttl)
		case a.provider != "" && (a.user != "" || a.passwordFile != ""):
			return session.Usagef("give --provider, or --user and --password-file, not both")
		}
		named := s.ContextNamed()
		if named != "" {
			if err := account.CheckContext(named); err != nil {
				return session.Usagef("--context: %v", err)
			}
		}
		path, book, err := s.Book()
		if err != nil {
			return err
		}
		before, place := book.Contexts[book.Current], book.Contexts[book.Current]
		if named != "" {
			if before = book.Contexts[named]; before != nil {
				place = before
			} else {
				s.Fresh()
			}
		}
		conn, login, err := s.ConnectToLogIn(book, place)
		if err != nil {
			return err
		}
		defer conn.Close()
		completeLogin(s, &a, before, login)
		if err := a.ask(ctx, s, conn, login); err != nil {
			return err
		}
		ctx, cancel := s.Limit(ctx, callTimeout)
		defer cancel()
		var name string
		if err := account.Update(ctx, path, func(b *account.Book) error {
			name = contextFor(b, login, named)
			b.Contexts[name], b.Current = login, name
			return nil
		}); err != nil {
			return err
		}
		for _, first := range []string{"TRIVET_TOKEN", "TRIVET_TOKEN_FILE"} {
			if s.Env(first) != "" {
				s.Note("%s is set and takes precedence over this login", first)
			}
		}
		return printLogin(s, name, login)
	})
	return c
}

// completeLogin sets the user, provider, org and project of the new login l from the flags and the environment. before
// is the saved login that l replaces, or nil. If before has the same endpoints as l, completeLogin copies missing
// values from it: the user or provider if none is given, and the org and project if neither is given and the user or
// provider is the same.
func completeLogin(s *session.Session, a *loginFlags, before, l *account.Login) {
	l.User, l.Provider = a.user, a.provider
	l.Org, l.Project = s.Named()
	if before == nil || !sameEndpoints(before, l) {
		return
	}
	if l.User == "" && l.Provider == "" {
		if l.Provider = before.Provider; l.Provider == "" || a.passwordFile != "" {
			l.User, l.Provider = before.User, ""
		}
	}
	if before.Provider == l.Provider && (l.Provider != "" || before.User == l.User) &&
		l.Org == "" && l.Project == "" && !s.Given("org") && !s.Given("project") {
		l.Org, l.Project = before.Org, before.Project
	}
}

// ask gets a token for l, with a password or through the provider l.Provider. It stores in l the token, its expiry, and
// the org and project to which it is limited.
func (a *loginFlags) ask(ctx context.Context, s *session.Session, conn *dial.Conn, l *account.Login) error {
	var token *identityv1.IssueTokenResponse
	client := identityv1.NewIdentityServiceClient(conn)
	if l.Provider != "" {
		var err error
		if token, err = a.atProvider(ctx, s, client, l); err != nil {
			return err
		}
	} else {
		if a.user == "" && l.User != "" && s.Ask != nil && a.passwordFile == "" {
			s.Note("logging in to %s as %s", strings.Join(l.Endpoints, ","), l.User)
		}
		user, password, err := identity.ReadCredential(ctx, s, l.User, a.passwordFile)
		if err != nil {
			return err
		}
		ctx, cancel := s.Limit(ctx, callTimeout)
		defer cancel()
		l.User = user
		token, err = client.IssueToken(ctx, &identityv1.IssueTokenRequest{
			Username: user, Password: string(password), TtlSeconds: uint64(a.ttl / time.Second), OrgId: l.Org, ProjectId: l.Project,
		})
		if err != nil {
			return err
		}
	}
	if token.GetOrgId() != "" {
		l.Org = token.GetOrgId()
	}
	if token.GetProjectId() != "" {
		l.Project = token.GetProjectId()
	}
	l.Token, l.ExpiresAt = account.Secret(token.GetToken()), time.UnixMilli(token.GetExpiresAt()).UTC()
	s.Keep(l.Token)
	return nil
}

// printLogin prints the login l, saved as the context name, without its token.
func printLogin(s *session.Session, name string, l *account.Login) error {
	return s.PrintValue(struct {
		Context   string    `json:"context"`
		User      string    `json:"user"`
		Endpoints []string  `json:"endpoints"`
		Org       string    `json:"org_id"`
		Project   string    `json:"project_id"`
		ExpiresAt time.Time `json:"expires_at"`
	}{name, l.User, l.Endpoints, l.Org, l.Project, l.ExpiresAt}, []string{l.User}, func(w io.Writer) error {
		_, err := fmt.Fprintf(w, "logged in to %s as %s until %s; the context is %s\n",
			strings.Join(l.Endpoints, ","), show.Text(l.User), show.When(l.ExpiresAt.UnixMilli()), name)
		return err
	})
}

// Package login holds `trivet login`, which trades a name and a password, or what an outside provider says, for a token that
// the other commands use, and `trivet logout`, which ends it.
//
// Decision: a login renews the context it was made in. One as somebody else, to elsewhere or with another scope is a context
// of its own, named after them, so that no login takes the place of another unasked; --context names one.
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

// Commands returns the top-level commands of this package.
func Commands(s *session.Session) []*cobra.Command {
	return []*cobra.Command{loginCommand(s), logoutCommand(s), contextCommand(s)}
}

// callTimeout bounds each command, but for what a person does.
const callTimeout = 30 * time.Second

// loginFlags is what the command line says.
type loginFlags struct {
	user, passwordFile string
	provider           string
	port               uint16
	ttl                time.Duration
}

// loginCommand is `trivet login`.
func loginCommand(s *session.Session) *cobra.Command {
	var a loginFlags
	c := &cobra.Command{
		Use:   "login",
		Short: "Get a token and keep it for the other commands",
		Long: `Ask for a token with a name and a password, and keep it in $XDG_CONFIG_HOME/trivet/config.yaml (mode 0600) for the
other commands, together with --endpoint, what of TLS goes with it, --org and --project. The password is asked for, or read from a
file.

With --provider the name is proven by an outside OpenID provider: open the address that is printed in a browser of this
host, and log in there. The provider sends the browser back to a port of this host.

Logins are kept as contexts, of which one is the current one: ` + "`trivet context`" + ` lists them and changes between them. When the
token has ended, ` + "`trivet login`" + ` alone gets another one for the same user, endpoints, org and project. A login as another
user, to other endpoints or for another project makes a context of its own, named USER/PROJECT@HOST, unless --context
gives it a name.

With --org or --project the token is good there only. Without them it is good wherever you have a role, and each command
chooses with --org and --project; ` + "`trivet login --org= --project=`" + ` gets such a token again.`,
		Example: `  trivet login --endpoint 10.0.0.1,10.0.0.2,10.0.0.3 --tls-ca tls-ca.crt --user demo --project default
  trivet login --context prod --endpoint 10.0.0.1 --provider corp`,
		Args: session.Exactly(),
	}
	c.Flags().StringVar(&a.user, "user", "", "who you are (default: that of the context, or else asked)")
	identity.PasswordFileFlag(c, &a.passwordFile)
	c.Flags().StringVar(&a.provider, "provider", "", "the outside OpenID provider that proves who you are")
	c.Flags().Uint16Var(&a.port, "callback-port", 0, "the port that the provider sends the browser to, where it knows only one (default any)")
	c.Flags().DurationVar(&a.ttl, "ttl", 0, "how long the token is good (default 1h, at most 720h)")
	_ = c.RegisterFlagCompletionFunc("provider", identity.ProviderNames(s)) // fails only for a flag that there is not
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
				s.Note("%s is set and goes before this login", first)
			}
		}
		return printLogin(s, name, login)
	})
	return c
}

// completeLogin says as whom and where the login l is to be made. What is not said is as in the context of before, as far as that
// is about the same.
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

// ask gets the token.
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

// printLogin prints the login without its token.
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

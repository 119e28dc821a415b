// Package login holds `trivet login`, which trades a name and a password for a token that the other commands use.
package login

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// Command is `trivet login`.
func Command(s *session.Session) *cobra.Command {
	var user, passwordFile string
	var ttl time.Duration
	c := &cobra.Command{
		Use:   "login",
		Short: "Get a token and keep it for the other commands",
		Long: `Ask for a token with a name and a password, and keep it in $XDG_CONFIG_HOME/trivet/config.yaml (mode 0600) for the
other commands, together with --endpoint, what of TLS goes with it, --org and --project. The password is asked for, or read from a file.`,
		Example: "  trivet login --endpoint 10.0.0.1,10.0.0.2,10.0.0.3 --tls-ca tls-ca.crt --user demo --project default",
		Args:    session.Exactly(),
	}
	c.Flags().StringVar(&user, "user", "", "who you are (default: asked)")
	c.Flags().StringVar(&passwordFile, "password-file", "", "file with the password, - for standard input (default: asked)")
	c.Flags().DurationVar(&ttl, "ttl", 0, "how long the token is good (default 1h, at most 720h)")
	_ = c.MarkFlagFilename("password-file") // fails only for a flag that there is not
	c.RunE = s.Local(func(ctx context.Context, _ []string) error {
		if ttl < 0 || ttl%time.Second != 0 {
			return session.Usagef("--ttl %v: want whole seconds", ttl)
		}
		path, err := account.Path(s.Env)
		if err != nil {
			return err
		}
		conn, login, err := s.ConnectToLogIn()
		if err != nil {
			return err
		}
		defer conn.Close()
		user, password, err := credentials(ctx, s, user, passwordFile)
		if err != nil {
			return err
		}
		ctx, cancel := s.Limit(ctx, 30*time.Second)
		defer cancel()
		login.User = user
		login.Org, login.Project = s.Tenant()
		token, err := identityv1.NewIdentityServiceClient(conn).IssueToken(ctx, &identityv1.IssueTokenRequest{
			Username: user, Password: string(password), TtlSeconds: uint64(ttl / time.Second), OrgId: login.Org, ProjectId: login.Project,
		})
		if err != nil {
			return err
		}
		login.Token, login.ExpiresAt = account.Secret(token.GetToken()), time.UnixMilli(token.GetExpiresAt()).UTC()
		s.Keep(login.Token)
		if err := login.Save(path); err != nil {
			return err
		}
		for _, before := range []string{"TRIVET_TOKEN", "TRIVET_TOKEN_FILE"} {
			if s.Env(before) != "" {
				s.Note("%s is set and goes before this login", before)
			}
		}
		return tell(s, &login)
	})
	return c
}

// credentials asks for what was not given.
func credentials(ctx context.Context, s *session.Session, user, passwordFile string) (string, account.Secret, error) {
	if s.Ask == nil && (user == "" || passwordFile == "") {
		return "", "", session.Usagef("there is no terminal to ask at: give --user and --password-file")
	}
	var err error
	if user == "" {
		if user, err = s.Ask(ctx, "User: ", false); err != nil {
			return "", "", err
		}
	}
	var password account.Secret
	if passwordFile != "" {
		if password, err = account.ReadSecret(passwordFile, s.Stdin); err != nil {
			return "", "", fmt.Errorf("--password-file: %w", err)
		}
	} else {
		answer, err := s.Ask(ctx, "Password: ", true)
		if err != nil {
			return "", "", err
		}
		password = account.Secret(answer)
	}
	s.Keep(password)
	if user == "" || password == "" {
		return "", "", fmt.Errorf("neither the name nor the password can be empty")
	}
	return user, password, nil
}

// tell prints the login without its token.
func tell(s *session.Session, l *account.Login) error {
	switch s.Form {
	case show.JSON:
		text, err := json.MarshalIndent(struct {
			User      string    `json:"user"`
			Endpoints []string  `json:"endpoints"`
			Org       string    `json:"org_id"`
			Project   string    `json:"project_id"`
			ExpiresAt time.Time `json:"expires_at"`
		}{l.User, l.Endpoints, l.Org, l.Project, l.ExpiresAt}, "", "  ")
		if err != nil {
			return fmt.Errorf("print JSON: %w", err)
		}
		_, err = fmt.Fprintln(s.Stdout, string(text))
		return err
	case show.Name:
		_, err := fmt.Fprintln(s.Stdout, show.Text(l.User))
		return err
	}
	_, err := io.WriteString(s.Stdout, fmt.Sprintf("logged in to %s as %s until %s\n",
		strings.Join(l.Endpoints, ","), show.Text(l.User), show.When(l.ExpiresAt.UnixMilli())))
	return err
}

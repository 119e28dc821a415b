package identity

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/account"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// tokenCommand returns the command `trivet token`. The argument users is the shell completion for user IDs.
func tokenCommand(s *session.Session, users cobra.CompletionFunc) *cobra.Command {
	c := &cobra.Command{
		Use: "token", Short: "Issue, verify and revoke tokens", Args: cobra.NoArgs,
		Long: `Issue, verify and revoke tokens. Anybody who has a token can make calls with the rights of its holder until it
expires. People use ` + "`trivet login`" + `, which saves its token; these commands are for programs that keep a token
themselves. A token is never given as an argument, because other users of a host can see the arguments of programs.`,
		Example: "  trivet token issue --user ci@acme/web --password-file ci.secret --file ci.token --ttl 24h\n  trivet token verify --file ci.token\n  trivet token revoke --file ci.token",
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(issueTokenCommand(s), verifyTokenCommand(s), revokeTokenCommand(s), revokeAllTokensCommand(s, users))
	return c
}

func issueTokenCommand(s *session.Session) *cobra.Command {
	var user, passwordFile, file string
	var ttl time.Duration
	c := &cobra.Command{
		Use: "issue", Short: "Issue a token and print it", Args: noTokenArgument,
		Long: `Issue a token for a user ID and password, or for a service account, named NAME@ORG/PROJECT or by its ID, and its secret.
Only the token is printed on standard output; with --file it is written to a new file that only you can read. The token
cannot be shown again. It is limited to the org and project of --org and --project; that of a service account is limited
to its project.`,
		Example: "  trivet token issue --user ci@acme/web --password-file ci.secret --file ci.token",
	}
	c.Flags().StringVar(&user, "user", "", "user ID, or a service account as NAME@ORG/PROJECT (default: ask)")
	PasswordFileFlag(c, &passwordFile)
	c.Flags().StringVar(&file, "file", "", "write the token to this new file, mode 0600, instead of standard output")
	c.Flags().DurationVar(&ttl, "ttl", 0, "lifetime of the token (default 1h, at most 720h)")
	_ = c.MarkFlagFilename("file") // its only error is for an unknown flag
	c.RunE = s.Local(func(ctx context.Context, _ []string) (err error) {
		if ttl < 0 || ttl%time.Second != 0 {
			return session.Usagef("--ttl %v: want whole seconds", ttl)
		}
		conn, err := s.ConnectWith("", "the password")
		if err != nil {
			return err
		}
		defer conn.Close()
		user, password, err := ReadCredential(ctx, s, user, passwordFile)
		if err != nil {
			return err
		}
		keep := func(account.Secret) error { return nil }
		if file != "" {
			out, err := account.NewSecretFile(file)
			if err != nil {
				return fmt.Errorf("--file: %w", err)
			}
			written := false
			defer func() {
				if !written {
					_ = out.Remove()
				}
			}()
			keep = func(t account.Secret) error { written = true; return out.Write(t) }
		}
		ctx, cancel := s.Limit(ctx, callTimeout)
		defer cancel()
		org, project := s.Named()
		t, err := identityv1.NewIdentityServiceClient(conn).IssueToken(ctx, &identityv1.IssueTokenRequest{
			Username: user, Password: string(password), TtlSeconds: uint64(ttl / time.Second), OrgId: org, ProjectId: project,
		})
		if err != nil {
			return err
		}
		if err := keep(account.Secret(t.GetToken())); err != nil {
			return fmt.Errorf("--file: %w", err)
		}
		s.Note("valid until %s", show.When(t.GetExpiresAt()))
		if file != "" {
			return s.Done(file, "has the token")
		}
		return s.Print(t, []string{t.GetToken()}, func(w io.Writer) error {
			_, err := fmt.Fprintln(w, t.GetToken())
			return err
		})
	})
	return c
}

func verifyTokenCommand(s *session.Session) *cobra.Command {
	var file string
	c := &cobra.Command{
		Use: "verify", Short: "Verify a token and print its holder", Args: noTokenArgument,
		Long: `Verify a token and print its holder. The exit status is 1 for an invalid token, and for an unauthenticated one,
which the REST token endpoint issues to anybody for any name when the password is missing or wrong: its holder is
not verified. The token is that of --file, or else the one that other commands would use: that of --token-file,
TRIVET_TOKEN, TRIVET_TOKEN_FILE or the login.`,
		Example: "  trivet token verify --file ci.token\n  pass show ci-token | trivet token verify --file -",
	}
	tokenFileFlag(c, &file)
	c.RunE = s.Local(func(ctx context.Context, _ []string) error {
		token, err := readToken(s, file)
		if err != nil {
			return err
		}
		conn, err := s.ConnectWith("", "the token")
		if err != nil {
			return err
		}
		defer conn.Close()
		ctx, cancel := s.Limit(ctx, callTimeout)
		defer cancel()
		v, err := identityv1.NewIdentityServiceClient(conn).VerifyToken(ctx, &identityv1.VerifyTokenRequest{Token: string(token)})
		if err != nil {
			return err
		}
		var names []string
		unauthenticated := v.GetHolder().GetProof() == noProof
		if v.GetValid() && !unauthenticated {
			names = []string{v.GetHolder().GetPrincipalId()}
		}
		if err := s.Print(v, names, func(w io.Writer) error {
			if !v.GetValid() {
				return nil
			}
			return show.Fields(w, holderFields(v.GetHolder()))
		}); err != nil {
			return err
		}
		if !v.GetValid() {
			const invalid = "the token is not valid"
			if reason := v.GetReason(); reason != "" && reason != invalid {
				return errors.New(invalid + ": " + reason)
			}
			return errors.New(invalid)
		}
		if unauthenticated {
			return errUnauthenticated
		}
		return nil
	})
	return c
}

var errUnauthenticated = errors.New("the token is unauthenticated: it was issued without the right password, so every call with it is refused; " +
	"get another one with `trivet token issue` or `trivet login`")

func revokeTokenCommand(s *session.Session) *cobra.Command {
	var file, id string
	c := &cobra.Command{
		Use: "revoke", Short: "Revoke a token", Args: noTokenArgument,
		Long: `Revoke a token for good. With --file anybody who holds the token can revoke it. With --id, which ` + "`trivet whoami`" + ` and
` + "`trivet token verify`" + ` show, it requires the role system:admin. ` + "`trivet logout`" + ` revokes the token of the login.`,
		Example: "  trivet token revoke --file ci.token\n  trivet token revoke --id 0197c2a4-5d1e-4c3b-9f00-6a2b8c4d1e5f",
	}
	tokenFileFlag(c, &file)
	c.Flags().StringVar(&id, "id", "", "ID of the token")
	c.RunE = s.Local(func(ctx context.Context, _ []string) error {
		if (file == "") == (id == "") {
			return session.Usagef("give --file or --id")
		}
		ctx, cancel := s.Limit(ctx, callTimeout)
		defer cancel()
		if id != "" {
			conn, err := s.Connect()
			if err != nil {
				return err
			}
			defer conn.Close()
			if _, err := identityv1.NewIdentityServiceClient(conn).RevokeToken(ctx, &identityv1.RevokeTokenRequest{TokenId: id}); err != nil {
				return err
			}
			return s.Done(id, "is revoked")
		}
		token, err := readToken(s, file)
		if err != nil {
			return err
		}
		conn, err := s.ConnectWith(token, "")
		if err != nil {
			return err
		}
		defer conn.Close()
		if err := RevokeToken(ctx, conn, token); err != nil {
			return err
		}
		return s.Done("the token", "is revoked")
	})
	return c
}

func revokeAllTokensCommand(s *session.Session, users cobra.CompletionFunc) *cobra.Command {
	c := &cobra.Command{
		Use: "revoke-all USER", Short: "Revoke all existing tokens of a user", Args: session.Exactly("USER"), ValidArgsFunction: session.FirstArg(users),
		Long: `Revoke all existing tokens of a user or a service account, for instance because one was lost. Tokens that are issued
later are not affected. Requires the role system:admin, unless USER is yourself.`,
	}
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, user string) error {
		if _, err := identityv1.NewIdentityServiceClient(conn).RevokeTokens(ctx, &identityv1.RevokeTokensRequest{UserId: user}); err != nil {
			return err
		}
		return s.Done(user, "has no valid tokens any more")
	})
	return c
}

func tokenFileFlag(c *cobra.Command, file *string) {
	c.Flags().StringVar(file, "file", "", "file with the token, - for standard input")
	_ = c.MarkFlagFilename("file") // its only error is for an unknown flag
}

// readToken reads a token from a file or, if file is empty, returns the token that other commands would use. It returns
// an error if file is itself a token.
func readToken(s *session.Session, file string) (account.Secret, error) {
	if file == "" {
		return s.Token()
	}
	if looksLikeToken(file) {
		return "", errTokenArgument
	}
	token, err := account.ReadSecret(file, s.Stdin)
	if err != nil {
		return "", fmt.Errorf("--file: %w", err)
	}
	s.Keep(token)
	return token, nil
}

var errTokenArgument error = &session.Usage{Message: "a token must not be an argument, because other users can see it: give a file, or - for standard input"}

// noTokenArgument checks that a command has no arguments. Its error does not quote the argument, which may be a token.
func noTokenArgument(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return errTokenArgument
	}
	return nil
}

// looksLikeToken reports whether text has the form of a JSON web token.
func looksLikeToken(text string) bool {
	return strings.HasPrefix(text, "eyJ") && strings.Count(text, ".") == 2
}

// RevokeToken revokes token, which must be the token that conn uses. It returns nil if the token was not valid any
// more.
func RevokeToken(ctx context.Context, conn *dial.Conn, token account.Secret) error {
	_, err := identityv1.NewIdentityServiceClient(conn).RevokeToken(ctx, &identityv1.RevokeTokenRequest{Token: string(token)})
	if status.Code(err) == codes.Unauthenticated {
		return nil
	}
	return err
}

package identity

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

func setPasswordCommand(s *session.Session) *cobra.Command {
	var file, current string
	c := &cobra.Command{
		Use: "password [USER]", Short: "Set a user's password, or your own", Args: session.AtMost("USER"),
		Long: `Set a user's password, 8 to 256 bytes long. Without USER it is your own, and your current password is required. The
password is read from a file, or typed twice at the terminal without being shown. An administrator sets a user's
first password. Existing tokens of the user are revoked: after changing your own password, log in again.`,
		Example:           "  trivet user password ada\n  openssl rand -base64 18 > ada.password && trivet user password ada --password-file ada.password",
		ValidArgsFunction: session.FirstArg(userNames(s)),
	}
	PasswordFileFlag(c, &file)
	c.Flags().StringVar(&current, "current-password-file", "", "file with your current password, - for standard input (default: ask)")
	_ = c.MarkFlagFilename("current-password-file") // its only error is for an unknown flag
	c.RunE = s.Local(func(ctx context.Context, args []string) error {
		conn, err := s.Connect()
		if err != nil {
			return err
		}
		defer conn.Close()
		client := identityv1.NewIdentityServiceClient(conn)
		ask := &identityv1.SetPasswordRequest{}
		if len(args) > 0 {
			ask.UserId = args[0]
		}
		if ask.CurrentPassword, err = currentPassword(ctx, s, client, ask, current); err != nil {
			return err
		}
		// The deadline of the call starts after the person has typed the password.
		password, err := ReadNewPassword(ctx, s, file)
		if err != nil {
			return err
		}
		ask.Password = string(password)
		ctx, cancel := s.Limit(ctx, callTimeout)
		defer cancel()
		if _, err := client.SetPassword(ctx, ask); err != nil {
			return err
		}
		user := ask.GetUserId()
		return s.Done(user, "has a new password; its earlier tokens are revoked")
	})
	return c
}

// currentPassword reads and returns the caller's current password, if the request in the parameter ask is to change the
// caller's own password. It returns "" if the request is for another user or the caller uses the host key. If the
// request names no user, currentPassword sets its user to the caller.
func currentPassword(ctx context.Context, s *session.Session, client identityv1.IdentityServiceClient, ask *identityv1.SetPasswordRequest, file string) (string, error) {
	short, cancel := s.Limit(ctx, callTimeout)
	defer cancel()
	me, err := client.WhoAmI(short, &identityv1.WhoAmIRequest{})
	if err != nil {
		return "", err
	}
	if ask.GetUserId() == "" {
		ask.UserId = me.GetPrincipalId()
	}
	if ask.GetUserId() != me.GetPrincipalId() || me.GetProof() == "hostkey" {
		return "", nil // no current password is needed for another user, or for a call with the host key
	}
	secret, err := readCurrentPassword(ctx, s, file)
	return string(secret), err
}

func linkIdentityCommand(s *session.Session, verb, short string,
	do func(context.Context, identityv1.IdentityServiceClient, string, *identityv1.Identity) (*identityv1.User, error)) *cobra.Command {
	i := &identityv1.Identity{}
	c := userArgCommand(s, verb+" USER", short)
	c.Long = short + `. PROVIDER is a name in the control plane's configuration, and SUBJECT the provider's ID of the user:
the claim "sub" of its ID tokens, which stays the same when a mail address changes.`
	c.Example = "  trivet user " + verb + " ada --provider corp --subject 248289761001"
	c.Flags().StringVar(&i.Provider, "provider", "", "name of the OpenID provider")
	c.Flags().StringVar(&i.Subject, "subject", "", "the user's subject at the provider")
	// Errors are ignored: these functions fail only if the flag does not exist or already has a completion.
	_ = c.RegisterFlagCompletionFunc("provider", ProviderNames(s))
	session.Require(c, "provider", "subject")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		u, err := do(ctx, identityv1.NewIdentityServiceClient(conn), args[0], i)
		return printUser(ctx, s, conn, u, err)
	})
	return c
}

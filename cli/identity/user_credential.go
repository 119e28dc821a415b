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
		Use: "password [USER]", Short: "Set a user's password, or your own", Args: cobra.MaximumNArgs(1),
		Long: `Set a user's password, 8 to 256 bytes long; without USER your own, for which you give the one you have. It is asked for twice and
not shown, or read from a file. A user's first password is given by an administrator. Tokens that the user has until now end: after a change of your own, log in again.`,
		Example:           "  trivet user password ada\n  openssl rand -base64 18 > ada.password && trivet user password ada --password-file ada.password",
		ValidArgsFunction: session.FirstArg(userNames(s)),
	}
	PasswordFileFlag(c, &file)
	c.Flags().StringVar(&current, "current-password-file", "", "file with the password that you have now, - for standard input (default: asked)")
	_ = c.MarkFlagFilename("current-password-file") // fails only for a flag that there is not
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
		// A person may take longer to type than a call may.
		password, err := readNewPassword(ctx, s, file)
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
		return s.Done(user, "has a new password; its tokens of before have ended")
	})
	return c
}

// currentPassword asks who set their own password for the one that they have. Who is not named is who asks.
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
		return "", nil // another's, or the administrator's own: for whoever rules the cloud
	}
	secret, err := readCurrentPassword(ctx, s, file)
	return string(secret), err
}

func linkIdentityCommand(s *session.Session, verb, short string,
	do func(context.Context, identityv1.IdentityServiceClient, string, *identityv1.Identity) (*identityv1.User, error)) *cobra.Command {
	i := &identityv1.Identity{}
	c := userArgCommand(s, verb+" USER", short)
	c.Long = short + `. PROVIDER is a name of the control plane's configuration, and SUBJECT what the provider calls the user:
the "sub" of its ID tokens, which stays when a mail address changes.`
	c.Example = "  trivet user " + verb + " ada --provider corp --subject 248289761001"
	c.Flags().StringVar(&i.Provider, "provider", "", "the outside provider's name")
	c.Flags().StringVar(&i.Subject, "subject", "", "who the user is there")
	// These fail only for a flag that there is not.
	_ = c.RegisterFlagCompletionFunc("provider", ProviderNames(s))
	_ = c.MarkFlagRequired("provider")
	_ = c.MarkFlagRequired("subject")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		u, err := do(ctx, identityv1.NewIdentityServiceClient(conn), args[0], i)
		return printUser(s, u, err)
	})
	return c
}

package identity

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// keyCommand returns the command `trivet key`.
func keyCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "key", Short: "Rotate and revoke the keys that sign tokens", Args: cobra.NoArgs,
		Long: `Rotate and revoke the keys that sign tokens. A key is first staged, so that all programs that verify tokens can load
it; then primary: it signs tokens; then secondary until the last token that it signed has expired. These commands
require the role system:admin.`,
		Example: "  trivet key list\n  trivet key rotate",
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(keys.Command(s, &cobra.Command{Use: "list", Short: "List the keys"}, callTimeout), rotateKeysCommand(s), revokeKeyCommand(s))
	return c
}

var keys = &list.Kind[*identityv1.Key]{
	Page: func(ctx context.Context, conn *dial.Conn, q list.Query) ([]*identityv1.Key, string, error) {
		all, err := identityv1.NewIdentityServiceClient(conn).ListKeys(ctx, &identityv1.ListKeysRequest{})
		if err != nil {
			return nil, "", err
		}
		return list.Slice(all.GetKeys(), q)
	},
	Name: (*identityv1.Key).GetId,
	Columns: func(_ context.Context, s *session.Session, _ *dial.Conn) []list.Column[*identityv1.Key] {
		return []list.Column[*identityv1.Key]{
			{Name: "ID", Text: (*identityv1.Key).GetId},
			{Name: "USE", Text: (*identityv1.Key).GetUse},
			list.Age("AGE", s.Now, (*identityv1.Key).GetCreatedAt),
			list.Time("CREATED", (*identityv1.Key).GetCreatedAt, list.InWide),
			list.Until("ENDS", s.Now, (*identityv1.Key).GetEndsAt),
		}
	},
}

func rotateKeysCommand(s *session.Session) *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use: "rotate", Short: "Start to sign with the staged key", Args: session.Exactly(),
		Long: `Start to sign with the staged key. Tokens that the previous key signed stay valid. The command fails while programs
that verify tokens may not have loaded the staged key yet; with --force they may refuse new tokens for a while.`,
	}
	c.Flags().BoolVar(&force, "force", false, "rotate even if other programs may not have loaded the staged key")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		all, err := identityv1.NewIdentityServiceClient(conn).RotateKeys(ctx, &identityv1.RotateKeysRequest{Force: force})
		if err != nil {
			return err
		}
		return keys.PrintAll(ctx, s, conn, all.GetKeys()...)
	})
	return c
}

func revokeKeyCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "revoke KEY", Short: "Delete a leaked key and with it all tokens that it signed", Args: session.Exactly("KEY"),
		Long: `Delete a leaked key. All tokens that it signed become invalid, perhaps your own too: then log in again. The primary
key can only be revoked if there is a staged key to replace it.`,
		ValidArgsFunction: session.FirstArg(keys.Names(s)),
	}
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, key string) error {
		all, err := identityv1.NewIdentityServiceClient(conn).RevokeKey(ctx, &identityv1.RevokeKeyRequest{KeyId: key})
		if err != nil {
			return err
		}
		return keys.PrintAll(ctx, s, conn, all.GetKeys()...)
	})
	return c
}

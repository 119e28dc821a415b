package identity

import (
	"context"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// keyCommand is `trivet key`.
func keyCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "key", Short: "Rotate and revoke the keys that tokens are signed with", Args: cobra.NoArgs,
		Long: `Rotate and revoke the keys that tokens are signed with. A key is staged, so that everybody who checks tokens learns of it;
then primary, which signs; then secondary until the last token that it signed has ended. All of this takes the role
system:admin.`,
		Example: "  trivet key list\n  trivet key rotate",
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(keys.Command(s, &cobra.Command{Use: "list", Short: "List the keys"}, callTimeout, nil), rotateKeysCommand(s), revokeKeyCommand(s))
	return c
}

var keys = &session.List[*identityv1.Key]{
	Page: func(ctx context.Context, conn *dial.Conn, _ string) ([]*identityv1.Key, string, error) {
		all, err := identityv1.NewIdentityServiceClient(conn).ListKeys(ctx, &identityv1.ListKeysRequest{})
		return all.GetKeys(), "", err
	},
	Whole:  func(all []*identityv1.Key) proto.Message { return &identityv1.ListKeysResponse{Keys: all} },
	Name:   (*identityv1.Key).GetId,
	Header: []string{"ID", "USE", "CREATED", "ENDS"},
	Row: func(k *identityv1.Key) []string {
		return []string{k.GetId(), k.GetUse(), show.When(k.GetCreatedAt()), show.When(k.GetEndsAt())}
	},
}

func rotateKeysCommand(s *session.Session) *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use: "rotate", Short: "Sign with the staged key from now on", Args: session.Exactly(),
		Long: `Sign with the staged key from now on. Tokens that were signed with the key of before stay good. It is refused while others may
not know the staged key yet; with --force it is done all the same, and they may refuse new tokens for a while.`,
	}
	c.Flags().BoolVar(&force, "force", false, "though others may not know the staged key yet")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		all, err := identityv1.NewIdentityServiceClient(conn).RotateKeys(ctx, &identityv1.RotateKeysRequest{Force: force})
		if err != nil {
			return err
		}
		return keys.Print(s, all, all.GetKeys()...)
	})
	return c
}

func revokeKeyCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "revoke KEY", Short: "Forget a key that leaked; every token that it signed ends", Args: session.Exactly("KEY"),
		Long: `Forget a key that leaked. Every token that it signed ends, which may be your own: then log in again. The primary needs a staged
one to follow it.`,
		ValidArgsFunction: session.FirstArg(keys.Names(s)),
	}
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		all, err := identityv1.NewIdentityServiceClient(conn).RevokeKey(ctx, &identityv1.RevokeKeyRequest{KeyId: args[0]})
		if err != nil {
			return err
		}
		return keys.Print(s, all, all.GetKeys()...)
	})
	return c
}

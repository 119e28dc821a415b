package node

import (
	"context"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
)

func evictCommand(s *session.Session) *cobra.Command {
	r := &operatorv1.EvictNodeRequest{}
	c := &cobra.Command{
		Use:   "evict NODE",
		Short: "Take a host out of the cloud",
		Long: `Take a host out of the cloud: its certificate ends at once, and its record goes. It may join again with a new token,
as a new host.

A host that machines are placed on is refused: move or delete them first. With --force they stay its own: its record
stays, cordoned, its guests run on, and nothing of them is started elsewhere, since nobody can tell whether they run.
With a new token on the same host it is that host again. "trivet node ban" keeps it from that.`,
		Args: session.Exactly("NODE"), ValidArgsFunction: session.FirstArg(names(s)),
	}
	c.Flags().BoolVar(&r.Force, "force", false, "also while machines are placed on it; they stay its own")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) (err error) {
		if r.NodeId, err = find(ctx, conn, args[0]); err != nil {
			return err
		}
		a, err := operatorv1.NewOperatorServiceClient(conn).EvictNode(ctx, r)
		if err != nil {
			return err
		}
		if a.GetVms() > 0 {
			s.Note("%d machines stay placed on it; its record stays, cordoned", a.GetVms())
		}
		return s.Done(args[0], "evicted")
	})
	return c
}

func banCommand(s *session.Session) *cobra.Command {
	var key, reason string
	c := &cobra.Command{
		Use:   "ban NODE | --key KEY",
		Short: "Keep a host's key out of the cloud",
		Long: `Keep a host out until it is unbanned, whatever token it is given. Its guests, if it has any, are left as they are, and
stay its own. The ban is of its key: the host can be evicted as well.`,
		Args: cobra.MaximumNArgs(1), ValidArgsFunction: session.FirstArg(names(s)),
	}
	c.Flags().StringVar(&key, "key", "", "ban this key, of a host that is not known (any more)")
	c.Flags().StringVar(&reason, "reason", "", "why, for those who read the list")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		node, key, err := nodeOrKey(ctx, conn, args, key)
		if err != nil {
			return err
		}
		a, err := operatorv1.NewOperatorServiceClient(conn).BanNode(ctx, &operatorv1.BanNodeRequest{NodeId: node, Key: key, Reason: reason})
		if err != nil {
			return err
		}
		return printBans(s, a, a.GetBans())
	})
	return c
}

func unbanCommand(s *session.Session) *cobra.Command {
	var key string
	c := &cobra.Command{Use: "unban NODE | --key KEY", Short: "Let a banned host in again", Args: cobra.MaximumNArgs(1)}
	c.Flags().StringVar(&key, "key", "", "of a host that is not known any more; `trivet node bans` lists them")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		node, key, err := nodeOrKey(ctx, conn, args, key)
		if err != nil {
			return err
		}
		if _, err := operatorv1.NewOperatorServiceClient(conn).UnbanNode(ctx, &operatorv1.UnbanNodeRequest{NodeId: node, Key: key}); err != nil {
			return err
		}
		s.Note("it is cordoned; `trivet node uncordon` ends that")
		return s.Done(strings.Join(append(args, key), ""), "unbanned")
	})
	return c
}

// nodeOrKey is the host or the key that a command is about.
func nodeOrKey(ctx context.Context, conn *dial.Conn, args []string, key string) (node, itsKey string, err error) {
	if (len(args) == 0) == (key == "") {
		return "", "", session.Usagef("give a NODE or --key")
	}
	if key != "" {
		return "", key, nil
	}
	node, err = find(ctx, conn, args[0])
	return node, "", err
}

func bansCommand(s *session.Session) *cobra.Command {
	var limit int
	c := &cobra.Command{Use: "bans", Short: "List the keys that are banned", Args: session.Exactly()}
	c.Flags().IntVar(&limit, "limit", 0, "list so many at most")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		all, more, err := session.Pages(limit, func(token string) ([]*operatorv1.Ban, string, error) {
			page, err := operatorv1.NewOperatorServiceClient(conn).ListBans(ctx, &operatorv1.ListBansRequest{PageSize: session.PageSize, PageToken: token})
			return page.GetBans(), page.GetNextPageToken(), err
		})
		if err != nil {
			return err
		}
		err = printBans(s, &operatorv1.ListBansResponse{Bans: all}, all)
		if more {
			s.Note("there are more: --limit is %d", limit)
		}
		return err
	})
	return c
}

func printBans(s *session.Session, m proto.Message, all []*operatorv1.Ban) error {
	var keys []string
	var rows [][]string
	for _, b := range all {
		keys = append(keys, b.GetKey())
		rows = append(rows, []string{b.GetKey(), b.GetName(), b.GetNodeId(), show.When(b.GetBannedAt()), b.GetReason()})
	}
	return s.Print(m, keys, func(w io.Writer) error {
		return show.Rows(w, []string{"KEY", "NAME", "NODE", "SINCE", "REASON"}, rows)
	})
}

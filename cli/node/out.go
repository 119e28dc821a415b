package node

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
)

func evictCommand(s *session.Session) *cobra.Command {
	r := &operatorv1.EvictNodeRequest{}
	c := &cobra.Command{
		Use:   "evict HOST",
		Short: "Remove a host from the cloud",
		Long: `Remove a host from the cloud: its certificate is revoked and its record deleted. With a new token it can join again,
as a new host. The command takes one host, because it can lose VMs and volumes.

The command fails while VMs are placed on the host: move those that run with "trivet host drain", and delete the others.
With --force they stay placed on it: the host's record is kept and cordoned, its VMs keep running, and they are not started on another
host, because they may still run. With a new token the host joins again as the same host. "trivet host ban" prevents
that.

The command also fails while volumes are stored on the host, because they cannot be moved. With --force, if no VMs are
placed on the host, its record is deleted all the same. The content of these volumes is lost, and they can only be
deleted. Volumes in a Ceph cluster move to other hosts, except those that a deleted VM may still have open on the host.
Volumes in storage pools that other hosts share move to these hosts, also those of a deleted VM, as soon as the file
system shows that the host does not have them open any more.`,
		Args: session.Exactly("HOST"), ValidArgsFunction: session.FirstArg(hosts.Names(s)),
	}
	c.Flags().BoolVar(&r.Force, "force", false, "evict it even if it has VMs, which stay placed on it, or volumes, which are lost")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) (err error) {
		if r.NodeId, err = Find(ctx, conn, args[0]); err != nil {
			return err
		}
		a, err := operatorv1.NewOperatorServiceClient(conn).EvictNode(ctx, r)
		if err != nil {
			return err
		}
		if a.GetVms() > 0 {
			s.Note("%d VMs stay placed on the host; its record is kept and cordoned", a.GetVms())
		}
		return s.Done(args[0], "evicted")
	})
	return c
}

func banCommand(s *session.Session) *cobra.Command {
	var key, reason string
	c := &cobra.Command{
		Use:   "ban HOST | --key KEY",
		Short: "Ban a host's key from the cloud",
		Long: `Ban a host: its key is refused until it is unbanned, whatever token it has. VMs on the host are left as they are and
stay placed on it. The ban is stored for the key, so the host can be evicted as well. The command takes one host.`,
		Args: session.AtMost("HOST"), ValidArgsFunction: session.FirstArg(hosts.Names(s)),
	}
	c.Flags().StringVar(&key, "key", "", "ban this key, of a host without a record")
	c.Flags().StringVar(&reason, "reason", "", "reason, shown in the list of bans")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		node, key, err := nodeOrKey(ctx, conn, args, key)
		if err != nil {
			return err
		}
		a, err := operatorv1.NewOperatorServiceClient(conn).BanNode(ctx, &operatorv1.BanNodeRequest{NodeId: node, Key: key, Reason: reason})
		if err != nil {
			return err
		}
		return bans.PrintAll(ctx, s, conn, a.GetBans()...)
	})
	return c
}

func unbanCommand(s *session.Session) *cobra.Command {
	var key string
	c := &cobra.Command{Use: "unban HOST | --key KEY", Short: "Lift the ban of a host", Args: session.AtMost("HOST")}
	c.Flags().StringVar(&key, "key", "", "key of a host without a record, as in \"trivet host bans\"")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		node, key, err := nodeOrKey(ctx, conn, args, key)
		if err != nil {
			return err
		}
		if _, err := operatorv1.NewOperatorServiceClient(conn).UnbanNode(ctx, &operatorv1.UnbanNodeRequest{NodeId: node, Key: key}); err != nil {
			return err
		}
		s.Note("the host is cordoned: run `trivet host uncordon` to place VMs on it")
		return s.Done(strings.Join(append(args, key), ""), "unbanned")
	})
	return c
}

// nodeOrKey returns the host that the user has selected: its ID if the first argument names it, or its key if --key is
// given. It returns a *Usage error unless exactly one of the two is given.
func nodeOrKey(ctx context.Context, conn *dial.Conn, args []string, key string) (node, itsKey string, err error) {
	if (len(args) == 0) == (key == "") {
		return "", "", session.Usagef("give a HOST or --key")
	}
	if key != "" {
		return "", key, nil
	}
	node, err = Find(ctx, conn, args[0])
	return node, "", err
}

func bansCommand(s *session.Session) *cobra.Command {
	return bans.Command(s, &cobra.Command{Use: "bans", Short: "List the banned keys"}, callTimeout)
}

// bans describes the bans of hosts for lists. The key identifies a ban.
var bans = &list.Kind[*operatorv1.Ban]{
	Page: func(ctx context.Context, conn *dial.Conn, q list.Query) ([]*operatorv1.Ban, string, error) {
		page, err := operatorv1.NewOperatorServiceClient(conn).ListBans(ctx, &operatorv1.ListBansRequest{PageSize: q.Size, PageToken: q.Token})
		return page.GetBans(), page.GetNextPageToken(), err
	},
	Name: (*operatorv1.Ban).GetKey,
	Columns: func(_ context.Context, s *session.Session, _ *dial.Conn) []list.Column[*operatorv1.Ban] {
		type ban = *operatorv1.Ban
		return []list.Column[ban]{
			{Name: "KEY", Text: ban.GetKey},
			{Name: "NAME", Text: ban.GetName, Max: 20},
			{Name: "HOST ID", Text: ban.GetNodeId, In: list.InWide},
			list.Age("AGE", s.Now, ban.GetBannedAt),
			list.Time("SINCE", ban.GetBannedAt, list.InWide),
			{Name: "REASON", Text: ban.GetReason, Max: 20},
		}
	},
}

package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
)

// changeTimeout is the deadline of a command that changes the members, unless --timeout is given. Each such command
// changes the membership of two raft groups.
const changeTimeout = time.Minute

// state formats the state of a member in lower case, with the state that it is changing to: "learner, to be voter".
func state(m *operatorv1.Member) string {
	s := strings.ToLower(m.GetState())
	if wanted := strings.ToLower(m.GetWanted()); wanted != "" && wanted != s && m.GetState() != "LEAVING" {
		s += ", to be " + wanted
	}
	return s
}

func joinIDs(list []uint64) string {
	var out []string
	for _, n := range slices.Sorted(slices.Values(list)) {
		out = append(out, id(n))
	}
	return strings.Join(out, ",")
}

// parseMemberID parses the ID of a member. It returns a *Usage error unless the ID is a number above 0.
func parseMemberID(text string) (uint64, error) {
	n, err := strconv.ParseUint(text, 10, 63)
	if err != nil || n == 0 {
		return 0, session.Usagef("%q is not the ID of a member: `trivet cluster status` lists the members", text)
	}
	return n, nil
}

func printMembers(w io.Writer, all []*operatorv1.Member) error {
	var rows [][]string
	for _, m := range all {
		rows = append(rows, []string{id(m.GetId()), m.GetName(), m.GetAddress(), state(m)})
	}
	return show.Rows(w, []string{"MEMBER", "NAME", "ADDRESS", "STATE"}, rows)
}

func addCommand(s *session.Session) *cobra.Command {
	r := &operatorv1.AddMemberRequest{}
	c := &cobra.Command{
		Use:   "add ADDRESS",
		Short: "Add a member, before it is started",
		Long: `Add a member. ADDRESS is the address at which the other members reach it: HOST or HOST:PORT. Then start it with an
empty data directory and the cluster key, or a token ("trivet cluster token"). It starts as a learner and becomes a
voter when it has caught up, unless --learner is given.`,
		Example: "  trivet cluster add 10.0.0.4 --id 4\n" +
			"  trivet-controlplane --node-id 4 --listen 10.0.0.4 --join 10.0.0.1 --cluster-key cluster.key --tls-cert ... --tls-key ... --data-dir ...  # there",
		Args: session.Exactly("ADDRESS"),
	}
	c.Flags().Uint64Var(&r.Id, "id", 0, "ID of the member (default: generated)")
	c.Flags().StringVar(&r.Name, "name", "", "name of the member (default: node-ID)")
	c.Flags().StringSliceVar(&r.ClientUrls, "client-url", nil, "URL at which it serves clients (default: http://HOST:50051)")
	c.Flags().BoolVar(&r.Learner, "learner", false, "keep it a learner when it has caught up")
	c.RunE = s.Run(changeTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		r.RaftAddr = args[0]
		a, err := operatorv1.NewOperatorServiceClient(conn).AddMember(ctx, r)
		if err != nil {
			return err
		}
		return s.Print(a, []string{id(a.GetMember().GetId())}, func(w io.Writer) error { return printMembers(w, []*operatorv1.Member{a.GetMember()}) })
	})
	return c
}

func promoteCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{Use: "promote ID", Short: "Make a learner that has caught up a voter", Args: session.Exactly("ID")}
	c.RunE = s.Run(changeTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		n, err := parseMemberID(args[0])
		if err != nil {
			return err
		}
		if _, err := operatorv1.NewOperatorServiceClient(conn).PromoteMember(ctx, &operatorv1.PromoteMemberRequest{Id: n}); err != nil {
			return err
		}
		return s.Done("member "+args[0], "votes")
	})
	return c
}

func removeCommand(s *session.Session) *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use:   "remove ID",
		Short: "Remove a member; its ID cannot be used again",
		Args:  session.Exactly("ID"),
	}
	c.Flags().BoolVar(&force, "force", false, "remove it even if only one member is left, which then must not fail")
	c.RunE = s.Run(changeTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		n, err := parseMemberID(args[0])
		if err != nil {
			return err
		}
		if _, err := operatorv1.NewOperatorServiceClient(conn).RemoveMember(ctx, &operatorv1.RemoveMemberRequest{Id: n, Force: force}); err != nil {
			return err
		}
		return s.Done("member "+args[0], "removed")
	})
	return c
}

func replaceCommand(s *session.Session) *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use:   "replace ID",
		Short: "Let a member rejoin whose data directory is lost",
		Long: `Prepare the return of a member whose data directory is lost: start it again with an empty directory. It joins as a
learner and becomes a voter when it has caught up. The old data directory is refused if it is used again.`,
		Args: session.Exactly("ID"),
	}
	c.Flags().BoolVar(&force, "force", false, "do it even if only one member is left meanwhile")
	c.RunE = s.Run(changeTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		n, err := parseMemberID(args[0])
		if err != nil {
			return err
		}
		if _, err := operatorv1.NewOperatorServiceClient(conn).ReplaceMember(ctx, &operatorv1.ReplaceMemberRequest{Id: n, Force: force}); err != nil {
			return err
		}
		return s.Done("member "+args[0], "can be started with an empty data directory")
	})
	return c
}

func transferCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{Use: "transfer ID", Short: "Make a member the leader of all raft groups", Args: session.Exactly("ID")}
	c.RunE = s.Run(changeTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		n, err := parseMemberID(args[0])
		if err != nil {
			return err
		}
		if _, err := operatorv1.NewOperatorServiceClient(conn).TransferLeader(ctx, &operatorv1.TransferLeaderRequest{Id: n}); err != nil {
			return err
		}
		return s.Done("member "+args[0], "leads")
	})
	return c
}

func backupCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use:   "backup FILE",
		Short: "Write a backup of the whole cloud to a file",
		Long: `Write a backup of all records and of the key-value store, each a consistent snapshot, to FILE, which must not exist.
It is encrypted with the cluster key: keep the key too, in another place. "trivet-controlplane restore" restores the
backup.`,
		Args: session.Exactly("FILE"),
	}
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		if args[0] == "-" {
			return session.Usagef("FILE -: a backup is not written to standard output: give a file")
		}
		var size int64
		err := s.Wait("backing up", func(say func(string)) (err error) {
			size, err = receive(ctx, operatorv1.NewOperatorServiceClient(conn), args[0])
			return err
		})
		if err != nil {
			return err
		}
		return s.Done(args[0], fmt.Sprintf("written, %d bytes", size))
	})
	return c
}

// receive writes a backup of the cluster to a new file and returns its size in bytes. The file gets its name only when
// it is complete and synced to disk. receive returns an error if a file with that name exists.
func receive(ctx context.Context, client operatorv1.OperatorServiceClient, name string) (size int64, err error) {
	if err := checkNew(name); err != nil {
		return 0, err
	}
	err = atomicfile.Write(name, 0o600, func(f *os.File) error {
		stream, err := client.BackupCluster(ctx, &operatorv1.BackupClusterRequest{})
		if err != nil {
			return err
		}
		for {
			piece, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return checkNew(name)
			}
			if err != nil {
				return err
			}
			n, err := f.Write(piece.GetData())
			if err != nil {
				return err
			}
			size += int64(n)
		}
	})
	return size, err
}

// checkNew returns an error if there is already a file, directory or symbolic link with that name.
func checkNew(name string) error {
	if _, err := os.Lstat(name); !errors.Is(err, os.ErrNotExist) {
		return session.Errorf(codes.AlreadyExists, "", "%s exists already", name)
	}
	return nil
}

// Package node holds the commands for hosts, the machines that run VMs: `trivet host`. The API calls a host a node.
package node

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// callTimeout is the deadline of each command unless --timeout is given.
const callTimeout = 30 * time.Second

// Command returns the command `trivet host`.
func Command(s *session.Session) *cobra.Command {
	c := &cobra.Command{Use: "host", Short: "List, cordon, drain, add, evict and ban hosts", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	session.Old(c, "node")
	c.AddCommand(listCommand(s), showCommand(s), tokenCommand(s),
		changeCommand(s, "cordon", "Stop placing VMs on a host", func(ctx context.Context, c vmv1.NodeServiceClient, id string) (*vmv1.Node, error) {
			return c.CordonNode(ctx, &vmv1.CordonNodeRequest{NodeId: id})
		}),
		drainCommand(s),
		changeCommand(s, "uncordon", "Allow placing VMs on a host again, and end its drain or its maintenance", func(ctx context.Context, c vmv1.NodeServiceClient, id string) (*vmv1.Node, error) {
			return c.UncordonNode(ctx, &vmv1.UncordonNodeRequest{NodeId: id})
		}),
		evictCommand(s), fenceCommand(s), banCommand(s), unbanCommand(s), bansCommand(s))
	return c
}

func changeCommand(s *session.Session, verb, short string, do func(context.Context, vmv1.NodeServiceClient, string) (*vmv1.Node, error)) *cobra.Command {
	c := &cobra.Command{Use: verb + " HOST", Short: short, Args: session.Exactly("HOST"), ValidArgsFunction: session.FirstArg(hosts.Names(s))}
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		id, err := Find(ctx, conn, name)
		if err != nil {
			return err
		}
		n, err := do(ctx, vmv1.NewNodeServiceClient(conn), id)
		if err != nil {
			return err
		}
		return hosts.PrintOne(ctx, s, conn, n)
	})
	return c
}

func tokenCommand(s *session.Session) *cobra.Command {
	var name string
	var ttl time.Duration
	c := &cobra.Command{
		Use:     "token",
		Short:   "Create a token for one host to join the cloud",
		Long:    "Create a one-use token. Only the token is printed on standard output. Anybody who has it can add a host: keep it secret.",
		Example: "  trivet host token --name host7 > join.token\n  trivet-nodeagent --join-token join.token ...  # on host7",
		Args:    session.Exactly(),
	}
	c.Flags().StringVar(&name, "name", "", "name of the host, which only then can use the token")
	c.Flags().DurationVar(&ttl, "ttl", 0, "lifetime of the token (default 1h)")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		if name != "" {
			if err := cloud.CheckName("--name", name); err != nil {
				return session.Usagef("%v", err)
			}
		}
		if ttl < 0 || ttl%time.Second != 0 || ttl/time.Second > 1<<31 {
			return session.Usagef("--ttl %v: want whole seconds", ttl)
		}
		t, err := operatorv1.NewOperatorServiceClient(conn).CreateNodeToken(ctx,
			&operatorv1.CreateNodeTokenRequest{Name: name, TtlSeconds: uint32(ttl / time.Second)})
		if err != nil {
			return err
		}
		s.Note("valid for one host until %s", show.When(t.GetExpiresAt()))
		return s.Print(t, []string{t.GetToken()}, func(w io.Writer) error {
			_, err := fmt.Fprintln(w, t.GetToken())
			return err
		})
	})
	return c
}

// All returns all hosts, sorted by ID.
func All(ctx context.Context, conn *dial.Conn) ([]*vmv1.Node, error) { return hosts.All(ctx, conn) }

// Names returns a shell completion with the names of hosts.
func Names(s *session.Session) cobra.CompletionFunc { return hosts.Names(s) }

// NameOf returns a function that returns the name of a host by its ID.
func NameOf(ctx context.Context, conn *dial.Conn) func(id string) string {
	return session.NameOf(func() (map[string]string, error) {
		nodes, err := hosts.All(ctx, conn)
		names := map[string]string{}
		for _, n := range nodes {
			names[n.GetId()] = n.GetName()
		}
		return names, err
	})
}

// Find returns the ID of the host that has a name or an ID. For a name, it reads the complete list of hosts, because
// the API has no filter by name.
func Find(ctx context.Context, conn *dial.Conn, nameOrID string) (string, error) {
	if session.IsID(nameOrID) {
		return nameOrID, nil
	}
	n, err := FindHost(ctx, conn, nameOrID)
	return n.GetId(), err
}

// FindHost returns the host that has a name or an ID. It reads the complete list of hosts.
func FindHost(ctx context.Context, conn *dial.Conn, nameOrID string) (*vmv1.Node, error) {
	nodes, err := hosts.All(ctx, conn)
	if err != nil {
		return nil, err
	}
	var matches []session.Match
	for _, n := range nodes {
		switch nameOrID {
		case n.GetId():
			return n, nil
		case n.GetName():
			matches = append(matches, session.Match{ID: n.GetId(), About: show.Enum("NODE_STATE", n.GetState())})
		}
	}
	id, err := session.One("host", "", nameOrID, matches)
	if err != nil {
		return nil, err
	}
	return nodes[slices.IndexFunc(nodes, func(n *vmv1.Node) bool { return n.GetId() == id })], nil
}

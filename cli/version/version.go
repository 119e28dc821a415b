// Package version holds the command `trivet version`, which shows the versions of the client, the members and the
// hosts.
package version

import (
	"context"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/version"
)

// callTimeout is the deadline of the calls unless --timeout is given.
const callTimeout = 10 * time.Second

// versions is the result of the command. If members and hosts are not shown, their lists are empty but not nil, so that
// JSON has an empty array.
type versions struct {
	Client  version.Build `json:"client"`
	Members []member      `json:"members"`
	Hosts   []host        `json:"hosts"`
}

// member is a member of the control plane. Version is empty if the member has not answered.
type member struct {
	ID      uint64 `json:"id"`
	Name    string `json:"name"`
	Version string `json:"version"`
}

// host is a host, with the version of its agent.
type host struct {
	ID      string `json:"id"`
	Name    string `json:"name"`
	Version string `json:"version"`
}

// Command returns the command `trivet version`.
func Command(s *session.Session) *cobra.Command {
	var client bool
	c := &cobra.Command{
		Use: "version", Short: "Show the versions of the client, the members and the hosts", Args: session.Exactly(),
		Long: `Show the versions of this program, of the members of the control plane and of the agents of the hosts.

Without a login, and with --client, only the version of this program is shown. The versions of members and hosts
need the role system:admin. A member that does not answer within a second has no version.`,
		Example: "  trivet version\n  trivet version --client -o json",
	}
	c.Flags().BoolVar(&client, "client", false, "show only the version of this program")
	c.RunE = s.Local(func(ctx context.Context, _ []string) error {
		all := &versions{Client: version.Read(), Members: []member{}, Hosts: []host{}}
		var failed error
		if !client {
			loggedIn, err := s.HasToken()
			if err != nil {
				return err
			}
			if loggedIn {
				failed = all.ask(ctx, s)
			}
		}
		// The client's version is printed even if the control plane cannot be reached.
		if err := all.print(s); err != nil {
			return err
		}
		if status.Code(failed) == codes.PermissionDenied {
			s.Note("the versions of members and hosts are shown to callers with the role system:admin")
			return nil
		}
		return failed
	})
	return c
}

// ask adds the versions of the members and the hosts.
func (v *versions) ask(ctx context.Context, s *session.Session) error {
	conn, err := s.Connect()
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := s.Limit(ctx, callTimeout)
	defer cancel()
	cluster, err := operatorv1.NewOperatorServiceClient(conn).ClusterStatus(ctx, &operatorv1.ClusterStatusRequest{})
	if err != nil {
		return err
	}
	for _, m := range cluster.GetMembers() {
		v.Members = append(v.Members, member{m.GetId(), m.GetName(), m.GetVersion()})
	}
	hosts, err := listHosts(ctx, conn)
	if err != nil {
		return err
	}
	for _, n := range hosts {
		v.Hosts = append(v.Hosts, host{n.GetId(), n.GetName(), n.GetAgentVersion()})
	}
	return nil
}

func listHosts(ctx context.Context, conn *dial.Conn) ([]*vmv1.Node, error) {
	client := vmv1.NewNodeServiceClient(conn)
	all, _, err := session.Pages(0, func(token string) ([]*vmv1.Node, string, error) {
		page, err := client.ListNodes(ctx, &vmv1.ListNodesRequest{PageSize: session.PageSize, PageToken: token})
		return page.GetNodes(), page.GetNextPageToken(), err
	})
	return all, err
}

func (v *versions) print(s *session.Session) error {
	rows := [][]string{{"client", "trivet", v.Client.Version}}
	for _, m := range v.Members {
		name := m.Name
		if name == "" {
			name = strconv.FormatUint(m.ID, 10)
		}
		rows = append(rows, []string{"member", name, m.Version})
	}
	for _, h := range v.Hosts {
		rows = append(rows, []string{"host", h.Name, h.Version})
	}
	names := make([]string, len(rows))
	for i, row := range rows {
		names[i] = row[2]
	}
	return s.PrintValue(v, names, func(w io.Writer) error {
		return show.Rows(w, []string{"COMPONENT", "NAME", "VERSION"}, rows)
	})
}

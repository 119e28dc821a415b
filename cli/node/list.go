package node

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// hosts describes hosts for lists.
var hosts = &list.Kind[*vmv1.Node]{
	Page: func(ctx context.Context, conn *dial.Conn, q list.Query) ([]*vmv1.Node, string, error) {
		page, err := vmv1.NewNodeServiceClient(conn).ListNodes(ctx, &vmv1.ListNodesRequest{PageSize: q.Size, PageToken: q.Token})
		return page.GetNodes(), page.GetNextPageToken(), err
	},
	Name:    (*vmv1.Node).GetName,
	Columns: hostColumns,
}

// hostColumns returns the columns of a list of hosts. The columns of resources show the allocated and the allocatable
// amount. They are empty for callers without the right to read them.
func hostColumns(_ context.Context, s *session.Session, _ *dial.Conn) []list.Column[*vmv1.Node] {
	type node = *vmv1.Node
	used := func(name string, amount func(*vmv1.NodeCapacity) uint64, text func(used, total uint64) string) list.Column[node] {
		return list.Column[node]{
			Name: name,
			Text: func(n node) string {
				if n.GetAllocatable() == nil {
					return ""
				}
				return text(amount(n.GetAllocated()), amount(n.GetAllocatable()))
			},
			// The largest free amount is last.
			Order: list.By(func(n node) int64 { return int64(amount(n.GetAllocatable())) - int64(amount(n.GetAllocated())) }),
		}
	}
	heartbeat := list.Age("HEARTBEAT", s.Now, node.GetLastHeartbeat)
	heartbeat.In, heartbeat.Table = list.Everywhere, heartbeat.Text
	heartbeat.Text = func(n node) string { return show.When(n.GetLastHeartbeat()) }
	return []list.Column[node]{
		{Name: "NAME", Text: node.GetName},
		{Name: "ID", Text: node.GetId, In: list.InWide},
		{Name: "STATE", Text: func(n node) string { return show.Enum("NODE_STATE", n.GetState()) }},
		used("VCPUS", func(c *vmv1.NodeCapacity) uint64 { return uint64(c.GetVcpus()) }, func(used, total uint64) string { return fmt.Sprintf("%d/%d", used, total) }),
		used("MEMORY", func(c *vmv1.NodeCapacity) uint64 { return c.GetMemoryMib() << 20 }, show.Used),
		used("STORAGE", func(c *vmv1.NodeCapacity) uint64 { return c.GetStorageGib() << 30 }, show.Used),
		heartbeat,
		{Name: "AGENT", Text: node.GetAgentVersion, In: list.InWide},
		{Name: "LABELS", Text: func(n node) string { return show.Pairs(n.GetLabels()) }, In: list.InWide},
		{Name: "CLASSES", Text: func(n node) string { return strings.Join(n.GetSupportedStorageClasses(), ",") }, In: list.InWide},
	}
}

func listCommand(s *session.Session) *cobra.Command {
	return hosts.Command(s, &cobra.Command{Use: "list", Short: "List the hosts",
		Long: `List the hosts. VCPUS, MEMORY and STORAGE show what is allocated of what can be allocated. They are sorted by what is
free. HEARTBEAT is the time since the last heartbeat.`,
		Example: "  trivet host list --sort -memory --columns name,state,memory"}, callTimeout)
}

func lastHeartbeat(now time.Time, n *vmv1.Node) string {
	if age := show.Age(now, n.GetLastHeartbeat()); age != "" {
		return age + " ago"
	}
	return ""
}

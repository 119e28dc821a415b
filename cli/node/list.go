package node

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/columns"
	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// listColumns returns the columns of a list of hosts. The columns of resources show the allocated and the allocatable
// amount. They are empty for callers without the right to read them.
func listColumns(now func() time.Time) []columns.Column[*vmv1.Node] {
	type node = *vmv1.Node
	used := func(text func(*vmv1.NodeCapacity) string) func(node) string {
		return func(n node) string {
			if n.GetAllocatable() == nil {
				return ""
			}
			return text(n.GetAllocated()) + "/" + text(n.GetAllocatable())
		}
	}
	// The largest free amount is last.
	free := func(amount func(*vmv1.NodeCapacity) int64) func(a, b node) int {
		return columns.By(func(n node) int64 { return amount(n.GetAllocatable()) - amount(n.GetAllocated()) })
	}
	longest := func(a, b node) int { return columns.By(node.GetLastHeartbeat)(b, a) } // since the last heartbeat
	return []columns.Column[node]{
		{Name: "NAME", Text: node.GetName},
		{Name: "ID", Text: node.GetId},
		{Name: "STATE", Text: func(n node) string { return show.Enum("NODE_STATE", n.GetState()) }},
		{Name: "VCPUS", Text: used(func(c *vmv1.NodeCapacity) string { return fmt.Sprint(c.GetVcpus()) }),
			Order: free(func(c *vmv1.NodeCapacity) int64 { return int64(c.GetVcpus()) })},
		{Name: "MEMORY", Text: used(func(c *vmv1.NodeCapacity) string { return show.Bytes(c.GetMemoryMib() << 20) }),
			Order: free(func(c *vmv1.NodeCapacity) int64 { return int64(c.GetMemoryMib()) })},
		{Name: "STORAGE", Text: used(func(c *vmv1.NodeCapacity) string { return show.Bytes(c.GetStorageGib() << 30) }),
			Order: free(func(c *vmv1.NodeCapacity) int64 { return int64(c.GetStorageGib()) })},
		{Name: "HEARD", Text: func(n node) string { return lastHeartbeat(now(), n) }, Order: longest},
		{Name: "AGENT", Text: node.GetAgentVersion},
		{Name: "LABELS", Text: func(n node) string { return show.Pairs(n.GetLabels()) }, Optional: true},
		{Name: "CLASSES", Text: func(n node) string { return strings.Join(n.GetSupportedStorageClasses(), ",") }, Optional: true},
	}
}

func listCommand(s *session.Session) *cobra.Command {
	var limit int
	var f columns.Flags
	c := &cobra.Command{Use: "list", Short: "List the hosts", Args: session.Exactly(),
		Long: `List the hosts. VCPUS, MEMORY and STORAGE show what is allocated of what can be allocated. They are sorted by what is
free.`,
		Example: "  trivet host list --sort -memory --columns name,state,memory"}
	c.Flags().IntVar(&limit, "limit", 0, "list at most this many")
	columns.Add(c, &f, listColumns(s.Now))
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		table, err := columns.Choose(&f, listColumns(s.Now))
		if err != nil {
			return err
		}
		read := limit
		if table.Sorted() {
			read = 0 // the first ones in the order of --sort can be anywhere in the list
		}
		nodes, more, err := all(ctx, conn, read)
		if err != nil {
			return err
		}
		table.Sort(nodes)
		if limit > 0 && len(nodes) > limit {
			nodes, more = nodes[:limit], true
		}
		var names []string
		for _, n := range nodes {
			names = append(names, n.GetName())
		}
		err = s.Print(&vmv1.ListNodesResponse{Nodes: nodes}, names, func(w io.Writer) error { return table.Print(w, nodes...) })
		if more {
			s.Note("there are more: --limit is %d", limit)
		}
		return err
	})
	return c
}

// printRow prints a list of one host.
func printRow(w io.Writer, now time.Time, n *vmv1.Node) error {
	table, err := columns.Choose(&columns.Flags{}, listColumns(func() time.Time { return now }))
	if err != nil {
		return err
	}
	return table.Print(w, n)
}

func lastHeartbeat(now time.Time, n *vmv1.Node) string {
	if age := show.Age(now, n.GetLastHeartbeat()); age != "" {
		return age + " ago"
	}
	return ""
}

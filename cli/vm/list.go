package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/image"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/node"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

type vmObject = *vmv1.VirtualMachine

// listColumns returns the columns of a list of VMs. If tenants is true, the tenant of a VM is shown by default.
func listColumns(ctx context.Context, s *session.Session, conn *dial.Conn, tenants bool) []list.Column[vmObject] {
	tenant := list.Column[vmObject]{Name: "TENANT", Text: func(v vmObject) string { return v.GetOrgId() + "/" + v.GetProjectId() }, In: list.InWide}
	vcpus := list.Number("VCPUS", func(v vmObject) uint32 { return v.GetSpec().GetCpu().GetVcpus() })
	memory := list.Size("MEMORY", func(v vmObject) uint64 { return v.GetSpec().GetMemory().GetSizeMib() << 20 })
	disk := list.Size("DISK", diskBytes)
	age := list.Age("AGE", s.Now, vmObject.GetCreatedAt)
	disk.In = list.InWide
	if tenants {
		// The tenants take the place of these columns, so that a line has at most 80 characters.
		tenant.In, vcpus.In, memory.In, age.In = list.Everywhere, list.InWide, list.InWide, list.OnDemand
		tenant.Max = 20
	}
	hosts, images := node.NameOf(ctx, conn), image.NameOf(ctx, s, conn)
	return []list.Column[vmObject]{
		tenant,
		{Name: "NAME", Text: vmObject.GetName},
		{Name: "ID", Text: vmObject.GetId, In: list.InWide},
		{Name: "STATE", Text: func(v vmObject) string { return state(v.GetState()) }},
		vcpus,
		memory,
		disk,
		{Name: "ADDRESS", Text: firstAddress, In: list.InTable},
		{Name: "ADDRESSES", Text: func(v vmObject) string { return strings.Join(v.GetStatus().GetIpAddresses(), ",") }, In: list.InWide},
		{Name: "HOST", Text: func(v vmObject) string { return hosts(v.GetNodeId()) }, Max: 16},
		{Name: "HOST ID", Text: vmObject.GetNodeId, In: list.InWide},
		age,
		{Name: "IMAGE", Text: func(v vmObject) string { return images(imageID(v)) }, In: list.OnDemand},
		{Name: "IMAGE ID", Text: imageID, In: list.InWide},
		{Name: "LABELS", Text: func(v vmObject) string { return show.Pairs(v.GetLabels()) }, In: list.InWide},
		{Name: "CREATOR", Text: vmObject.GetCreatedBy, In: list.InWide},
		list.Time("CREATED", vmObject.GetCreatedAt, list.InWide),
		list.Time("CHANGED", vmObject.GetUpdatedAt, list.OnDemand),
		{Name: "ERROR", Text: func(v vmObject) string { return v.GetStatus().GetLastError() }, In: list.InWide},
	}
}

func diskBytes(v vmObject) (sum uint64) {
	for _, d := range v.GetSpec().GetDisks() {
		sum += d.GetSizeGib()
	}
	return sum << 30
}

// firstAddress returns the first address of a VM that is an IPv4 address or, without one, the first address.
func firstAddress(v vmObject) string {
	all := v.GetStatus().GetIpAddresses()
	for _, text := range all {
		if a, err := netip.ParseAddr(text); err == nil && a.Is4() {
			return text
		}
	}
	if len(all) == 0 {
		return ""
	}
	return all[0]
}

// imageID returns the ID of the image of a VM's first disk, or "" if that disk was not made from an image.
func imageID(v vmObject) string {
	if disks := v.GetSpec().GetDisks(); len(disks) > 0 {
		return disks[0].GetSource().GetImageId()
	}
	return ""
}

// scope selects the VMs of a list: those of all projects if all is true, and those that match also.
type scope struct {
	all bool
	// also is a part of the filter, besides that of the flags of lists.
	also string
}

// filter returns the filter of a list whose flags have the given filter.
func (o *scope) filter(given string) string {
	switch {
	case o.also == "":
		return given
	case strings.TrimSpace(given) == "":
		return o.also
	}
	return "(" + given + ") AND " + o.also
}

// narrow makes the list contain only VMs on a host, with a name or ID, and, in a list over all projects, those of --org
// and --project. An empty host selects all.
func (o *scope) narrow(ctx context.Context, s *session.Session, conn *dial.Conn, host string) (err error) {
	if host != "" {
		if host, err = node.Find(ctx, conn, host); err != nil {
			return err
		}
	}
	var org, project string
	if o.all {
		org, project = s.Within()
	}
	var terms []string
	for _, want := range []struct{ field, value string }{{"node_id", host}, {"org_id", org}, {"project_id", project}} {
		if want.value != "" {
			terms = append(terms, fmt.Sprintf("%s = %q", want.field, want.value))
		}
	}
	o.also = strings.Join(terms, " AND ")
	return nil
}

// hostTerm matches a comparison of the column HOST at the beginning of a text.
var hostTerm = regexp.MustCompile(`^host\s*(!?=|:)\s*("[^"]*"|'[^']*'|[^\s()]+)`)

// withHostIDs replaces comparisons of the column HOST in a filter, such as host = rack7, by comparisons of the field
// node_id, because VMs have only the IDs of their hosts. It returns an error if there is no such host.
func withHostIDs(ctx context.Context, conn *dial.Conn, filter string) (string, error) {
	var out strings.Builder
	for i := 0; i < len(filter); {
		c := filter[i]
		if end := strings.IndexByte(filter[i+1:], c); (c == '"' || c == '\'') && end >= 0 { // a text, which may contain such words
			out.WriteString(filter[i : i+end+2])
			i += end + 2
			continue
		}
		m := hostTerm.FindStringSubmatch(filter[i:])
		if m == nil || i > 0 && !strings.ContainsRune(" \t\n(-", rune(filter[i-1])) {
			out.WriteByte(c)
			i++
			continue
		}
		name, id := strings.Trim(m[2], `"'`), ""
		switch {
		case strings.Contains(name, "*") || m[1] == ":":
			return "", session.Usagef("--filter: %s: host is compared with = or != and the name or the ID of a host", m[0])
		case name != "":
			var err error
			if id, err = node.Find(ctx, conn, name); err != nil {
				return "", err
			}
		}
		fmt.Fprintf(&out, "node_id %s %q", m[1], id)
		i += len(m[0])
	}
	return out.String(), nil
}

// listed describes VMs for lists.
func listed(s *session.Session, of *scope) *list.Kind[vmObject] {
	return &list.Kind[vmObject]{
		Filters: true,
		Rewrite: withHostIDs,
		Name:    vmObject.GetName,
		Page: func(ctx context.Context, conn *dial.Conn, q list.Query) ([]vmObject, string, error) {
			if of.all {
				page, err := operatorv1.NewVmViewServiceClient(conn).ListAllVms(ctx, &operatorv1.ListAllVmsRequest{
					PageSize: q.Size, PageToken: q.Token, Filter: of.filter(q.Filter),
				})
				return page.GetVms(), page.GetNextPageToken(), err
			}
			org, project := s.Tenant()
			page, err := vmv1.NewVmServiceClient(conn).ListVms(ctx, &vmv1.ListVmsRequest{
				OrgId: org, ProjectId: project, PageSize: q.Size, PageToken: q.Token, Filter: of.filter(q.Filter),
			})
			return page.GetVms(), page.GetNextPageToken(), err
		},
		Columns: func(ctx context.Context, s *session.Session, conn *dial.Conn) []list.Column[vmObject] {
			return listColumns(ctx, s, conn, of.all)
		},
	}
}

// printVM prints a VM that a command has created or changed.
func printVM(ctx context.Context, s *session.Session, conn *dial.Conn, v vmObject) error {
	return listed(s, &scope{}).PrintOne(ctx, s, conn, v)
}

// printVMs prints VMs that a command has changed: as one object if single is true, or else as a list.
func printVMs(ctx context.Context, s *session.Session, conn *dial.Conn, single bool, vms []vmObject) error {
	if single {
		return printVM(ctx, s, conn, vms[0])
	}
	return listed(s, &scope{}).PrintAll(ctx, s, conn, vms...)
}

func listCommand(s *session.Session) *cobra.Command {
	var watch bool
	var host string
	var of scope
	c := &cobra.Command{Use: "list", Short: "List the project's VMs", Args: session.Exactly(),
		Long: `List the VMs of the project, in order of creation. With --watch, print the list and then a line for each change, until
you interrupt. A broken connection is opened again, and what changed meanwhile is printed.`,
		Example: `  trivet vm list --filter 'state = RUNNING AND memory >= 4096' -l env=prod
  trivet vm list --sort -memory --columns name,memory,labels
  trivet vm list -w --all-projects --filter 'state = ERROR'
  trivet vm list --all-projects --host rack7`}
	kind := listed(s, &of)
	f := kind.AddFlags(s, c)
	c.Flags().BoolVarP(&watch, "watch", "w", false, "print also the changes of the list, until you interrupt")
	session.AllProjectsFlag(c, &of.all)
	c.Flags().StringVar(&host, "host", "", "list only VMs that are placed on this host, by name or ID")
	_ = c.RegisterFlagCompletionFunc("host", node.Names(s)) // its only error is for an unknown flag
	session.Exclusive(c, "watch", "limit")
	session.Exclusive(c, "watch", "page-token")
	c.RunE = func(c *cobra.Command, args []string) error {
		// A watch has no deadline. The flag is known only now.
		limit := callTimeout
		if watch {
			limit = 0
		}
		return s.Run(limit, func(ctx context.Context, conn *dial.Conn, _ []string) error {
			if err := of.narrow(ctx, s, conn, host); err != nil {
				return err
			}
			if watch {
				return session.Interruptible(ctx, watchList(ctx, s, conn, kind, f, &of))
			}
			return kind.List(ctx, s, conn, f)
		})(c, args)
	}
	return c
}

// watchList prints the list and its changes.
func watchList(ctx context.Context, s *session.Session, conn *dial.Conn, kind *list.Kind[vmObject], f *list.Flags, of *scope) error {
	table, err := kind.Table(ctx, s, conn, f)
	if err != nil {
		return err
	}
	filter, err := f.Filter()
	if err != nil {
		return err
	}
	if filter, err = withHostIDs(ctx, conn, filter); err != nil {
		return err
	}
	filter = of.filter(filter)
	client := operatorv1.NewVmViewServiceClient(conn)
	org, project := s.Tenant()
	w := &list.Watch[vmObject]{
		Table: table,
		Name:  vmObject.GetName,
		Removed: func(id string, at int64) proto.Message {
			return &operatorv1.VmListChange{Type: operatorv1.VmListChangeType_VM_LIST_CHANGE_TYPE_REMOVED, VmId: id, Timestamp: at}
		},
		Stream: func(ctx context.Context, handle func(list.Change[vmObject]) error) error {
			if of.all {
				stream, err := client.WatchAllVms(ctx, &operatorv1.WatchAllVmsRequest{Filter: filter})
				if err != nil {
					return err
				}
				return receive(stream.Recv, handle)
			}
			stream, err := client.WatchVms(ctx, &operatorv1.WatchVmsRequest{OrgId: org, ProjectId: project, Filter: filter})
			if err != nil {
				return err
			}
			return receive(stream.Recv, handle)
		},
	}
	return w.Run(ctx, s, conn)
}

// receive reads a stream of changes to its end and calls handle with each.
func receive[M interface {
	GetChange() *operatorv1.VmListChange
}](recv func() (M, error), handle func(list.Change[vmObject]) error) error {
	for {
		m, err := recv()
		if errors.Is(err, io.EOF) {
			return session.ErrStreamEnded
		}
		if err != nil {
			return err
		}
		c := m.GetChange()
		if err := handle(list.Change[vmObject]{
			Kind: list.ChangeKind(c.GetType()), ID: c.GetVmId(), Object: c.GetVm(), At: c.GetTimestamp(), Message: c,
		}); err != nil {
			return err
		}
	}
}

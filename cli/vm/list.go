package vm

import (
	"context"
	"errors"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/columns"
	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	"github.com/trivet-cloud/trivet/cli/vm/lookup"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// listColumns returns the columns of a list of VMs. If tenants is true, the tenant of a VM is shown by default.
func listColumns(now func() time.Time, tenants bool) []columns.Column[*vmv1.VirtualMachine] {
	type vm = *vmv1.VirtualMachine
	disk := func(v vm) (sum uint64) {
		for _, d := range v.GetSpec().GetDisks() {
			sum += d.GetSizeGib()
		}
		return sum
	}
	vcpus := func(v vm) uint32 { return v.GetSpec().GetCpu().GetVcpus() }
	memory := func(v vm) uint64 { return v.GetSpec().GetMemory().GetSizeMib() }
	younger := func(a, b vm) int { return columns.By(vm.GetCreatedAt)(b, a) } // by age
	return []columns.Column[vm]{
		{Name: "TENANT", Text: func(v vm) string { return v.GetOrgId() + "/" + v.GetProjectId() }, Optional: !tenants},
		{Name: "NAME", Text: vm.GetName},
		{Name: "ID", Text: vm.GetId},
		{Name: "STATE", Text: func(v vm) string { return state(v.GetState()) }},
		{Name: "VCPUS", Text: func(v vm) string { return strconv.FormatUint(uint64(vcpus(v)), 10) }, Order: columns.By(vcpus)},
		{Name: "MEMORY", Text: func(v vm) string { return show.Bytes(memory(v) << 20) }, Order: columns.By(memory)},
		{Name: "DISK", Text: func(v vm) string { return show.Bytes(disk(v) << 30) }, Order: columns.By(disk)},
		{Name: "NODE", Text: vm.GetNodeId},
		{Name: "AGE", Text: func(v vm) string { return show.Age(now(), v.GetCreatedAt()) }, Order: younger},
		{Name: "ADDRESSES", Text: func(v vm) string { return strings.Join(v.GetStatus().GetIpAddresses(), ",") }, Optional: true},
		{Name: "LABELS", Text: func(v vm) string { return show.Pairs(v.GetLabels()) }, Optional: true},
		{Name: "CREATOR", Text: vm.GetCreatedBy, Optional: true},
		{Name: "CREATED", Text: func(v vm) string { return show.When(v.GetCreatedAt()) }, Order: columns.By(vm.GetCreatedAt), Optional: true},
		{Name: "CHANGED", Text: func(v vm) string { return show.When(v.GetUpdatedAt()) }, Order: columns.By(vm.GetUpdatedAt), Optional: true},
		{Name: "ERROR", Text: func(v vm) string { return v.GetStatus().GetLastError() }, Optional: true},
	}
}

// listFlags holds the values of the flags of `trivet vm list`.
type listFlags struct {
	filter      string
	limit       int
	watch       bool
	allProjects bool
	columns.Flags
}

func listCommand(s *session.Session) *cobra.Command {
	var f listFlags
	c := &cobra.Command{Use: "list", Short: "List the project's VMs", Args: session.Exactly(),
		Long: `List the VMs of the project, in order of creation. With --watch, print the list and then a line for each change, until
you interrupt. A broken connection is opened again, and what changed meanwhile is printed.`,
		Example: `  trivet vm list --filter 'state = RUNNING AND labels.env = "prod"'
  trivet vm list --sort -memory --columns name,memory,labels
  trivet vm list -w --all-projects --filter 'state = ERROR'`}
	c.Flags().StringVar(&f.filter, "filter", "", "list only VMs that match, such as: state = RUNNING")
	c.Flags().IntVar(&f.limit, "limit", 0, "list at most this many")
	c.Flags().BoolVarP(&f.watch, "watch", "w", false, "print also the changes of the list, until you interrupt")
	c.Flags().BoolVar(&f.allProjects, "all-projects", false, "list the VMs of all projects: for operators of the cloud")
	columns.Add(c, &f.Flags, listColumns(s.Now, true))
	session.Exclusive(c, "watch", "limit")
	c.RunE = func(c *cobra.Command, args []string) error {
		// A watch has no deadline. The flag is known only now.
		limit := callTimeout
		if f.watch {
			limit = 0
		}
		return s.Run(limit, func(ctx context.Context, conn *dial.Conn, _ []string) error {
			table, err := columns.Choose(&f.Flags, listColumns(s.Now, f.allProjects))
			if err != nil {
				return err
			}
			if f.watch {
				return session.Interruptible(ctx, f.watchList(ctx, s, conn, table))
			}
			return f.printList(ctx, s, conn, table)
		})(c, args)
	}
	return c
}

// printList prints the list once.
func (f *listFlags) printList(ctx context.Context, s *session.Session, conn *dial.Conn, table *columns.Table[*vmv1.VirtualMachine]) error {
	read := lookup.All
	if f.allProjects {
		read = lookup.AllProjects
	}
	limit := f.limit
	if table.Sorted() {
		limit = 0 // the first ones in the order of --sort can be anywhere in the list
	}
	vms, more, err := read(ctx, s, conn, f.filter, limit)
	if err != nil {
		return err
	}
	table.Sort(vms)
	if f.limit > 0 && len(vms) > f.limit {
		vms, more = vms[:f.limit], true
	}
	names := make([]string, len(vms))
	for i, vm := range vms {
		names[i] = vm.GetName()
	}
	err = s.Print(&vmv1.ListVmsResponse{Vms: vms}, names, func(w io.Writer) error { return table.Print(w, vms...) })
	if more {
		s.Note("there are more: --limit is %d", f.limit)
	}
	return err
}

// watchList prints the list and its changes.
func (f *listFlags) watchList(ctx context.Context, s *session.Session, conn *dial.Conn, table *columns.Table[*vmv1.VirtualMachine]) error {
	client := operatorv1.NewVmViewServiceClient(conn)
	org, project := s.Tenant()
	w := &columns.Watch[*vmv1.VirtualMachine]{
		Table: table,
		Name:  (*vmv1.VirtualMachine).GetName,
		Removed: func(id string, at int64) proto.Message {
			return &operatorv1.VmListChange{Type: operatorv1.VmListChangeType_VM_LIST_CHANGE_TYPE_REMOVED, VmId: id, Timestamp: at}
		},
		Stream: func(ctx context.Context, handle func(columns.Change[*vmv1.VirtualMachine]) error) error {
			if f.allProjects {
				stream, err := client.WatchAllVms(ctx, &operatorv1.WatchAllVmsRequest{Filter: f.filter})
				if err != nil {
					return err
				}
				return receive(stream.Recv, handle)
			}
			stream, err := client.WatchVms(ctx, &operatorv1.WatchVmsRequest{OrgId: org, ProjectId: project, Filter: f.filter})
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
}](recv func() (M, error), handle func(columns.Change[*vmv1.VirtualMachine]) error) error {
	for {
		m, err := recv()
		if errors.Is(err, io.EOF) {
			return session.ErrStreamEnded
		}
		if err != nil {
			return err
		}
		c := m.GetChange()
		if err := handle(columns.Change[*vmv1.VirtualMachine]{
			Kind: columns.Kind(c.GetType()), ID: c.GetVmId(), Object: c.GetVm(), At: c.GetTimestamp(), Message: c,
		}); err != nil {
			return err
		}
	}
}

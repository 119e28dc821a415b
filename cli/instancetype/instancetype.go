// Package instancetype implements the command `trivet instance-type`. Find returns a type for the commands that create
// and resize VMs.
package instancetype

import (
	"context"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// callTimeout is the deadline of each command.
const callTimeout = 30 * time.Second

// Command returns the command `trivet instance-type`.
func Command(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "instance-type", Aliases: []string{"flavor"}, Short: "Name sizes of VMs", Args: cobra.NoArgs,
		Long: `An instance type is a named size of VMs: a number of processors, an amount of memory and, optionally, the size of the
disk from which the VM boots. "trivet vm create --type" and "trivet vm resize --type" use it. A VM keeps its size when its
type is updated or deleted. Creating, changing and deleting a type requires the role system:admin.`,
		Example: `  trivet instance-type create small --vcpus 2 --memory 4G --disk 20
  trivet instance-type list
  trivet vm create web --image debian --type small --start`,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(createCommand(s), listCommand(s), showCommand(s), updateCommand(s), deleteCommand(s))
	return c
}

func createCommand(s *session.Session) *cobra.Command {
	req := &operatorv1.CreateInstanceTypeRequest{}
	var memory, disk string
	c := &cobra.Command{
		Use: "create NAME", Short: "Create an instance type", Args: session.Exactly("NAME"),
		Example: `  trivet instance-type create small --vcpus 2 --memory 4G --disk 20 --description "for small services"`,
	}
	p := c.Flags()
	p.Uint32Var(&req.Vcpus, "vcpus", 0, "virtual CPUs")
	p.StringVar(&memory, "memory", "", "memory in MiB, or with a unit: 2G")
	p.StringVar(&disk, "disk", "", "size of the disk from which the VM boots, in GiB or with a unit: 1T (default: none)")
	p.StringVar(&req.Description, "description", "", "text for people, at most 255 bytes")
	session.Require(c, "vcpus", "memory")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		if err := cloud.CheckName("NAME", args[0]); err != nil {
			return session.Usagef("%v", err)
		}
		req.Name = args[0]
		var ok bool
		if req.MemoryMib, ok = session.Amount(memory, session.MiB); !ok {
			return session.Usagef("--memory %q: want a number of MiB, or one with a unit: 2G", memory)
		}
		if disk != "" {
			if req.RootDiskGib, ok = session.Amount(disk, session.GiB); !ok {
				return session.Usagef("--disk %q: want a number of GiB, or one with a unit: 1T", disk)
			}
		}
		t, err := operatorv1.NewInstanceTypeServiceClient(conn).CreateInstanceType(ctx, req)
		if err != nil {
			return err
		}
		return types.PrintOne(ctx, s, conn, t)
	})
	return c
}

func listCommand(s *session.Session) *cobra.Command {
	return types.Command(s, &cobra.Command{Use: "list", Short: "List the instance types"}, callTimeout)
}

// types describes instance types for lists.
var types = &list.Kind[*operatorv1.InstanceType]{
	Page: func(ctx context.Context, conn *dial.Conn, q list.Query) ([]*operatorv1.InstanceType, string, error) {
		page, err := operatorv1.NewInstanceTypeServiceClient(conn).ListInstanceTypes(ctx, &operatorv1.ListInstanceTypesRequest{
			PageSize: q.Size, PageToken: q.Token,
		})
		return page.GetInstanceTypes(), page.GetNextPageToken(), err
	},
	Name: (*operatorv1.InstanceType).GetName,
	Columns: func(context.Context, *session.Session, *dial.Conn) []list.Column[*operatorv1.InstanceType] {
		type instanceType = *operatorv1.InstanceType
		yesNo := map[bool]string{true: "yes", false: "no"}
		disk := list.Size("DISK", func(t instanceType) uint64 { return t.GetRootDiskGib() << 30 })
		disk.Text = func(t instanceType) string {
			if t.GetRootDiskGib() == 0 {
				return "" // the type has no size for the disk
			}
			return show.Bytes(t.GetRootDiskGib() << 30)
		}
		return []list.Column[instanceType]{
			{Name: "NAME", Text: instanceType.GetName},
			list.Number("VCPUS", instanceType.GetVcpus),
			list.Size("MEMORY", func(t instanceType) uint64 { return t.GetMemoryMib() << 20 }),
			disk,
			{Name: "AVAILABLE", Text: func(t instanceType) string { return yesNo[t.GetAvailable()] }},
			{Name: "DESCRIPTION", Text: instanceType.GetDescription, Max: 24},
		}
	},
}

func showCommand(s *session.Session) *cobra.Command {
	c := argCommand(s, "show TYPE", "Show an instance type")
	session.Many(c)
	c.RunE = s.ShowEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		t, err := get(ctx, conn, name)
		if err != nil {
			return err
		}
		return types.PrintOne(ctx, s, conn, t)
	})
	return c
}

func updateCommand(s *session.Session) *cobra.Command {
	var available bool
	var description string
	c := argCommand(s, "update TYPE", "Change the description and the availability of an instance type")
	c.Long = `Change the description and the availability of an instance type. A flag that is not given changes nothing. The sizes of
a type cannot be changed, so that all VMs that are created with a type have the same size. To replace a type, create
another one, and make the old one unavailable: VMs that have it keep their size.`
	c.Example = "  trivet instance-type update small --available=false --description \"use medium\""
	p := c.Flags()
	p.BoolVar(&available, "available", true, "whether VMs can be created with the type, or resized to it")
	p.StringVar(&description, "description", "", "text for people, at most 255 bytes")
	session.RequireOne(c, "available", "description")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		req := &operatorv1.UpdateInstanceTypeRequest{Name: args[0]}
		if p.Changed("available") {
			req.Available = &available
		}
		if p.Changed("description") {
			req.Description = &description
		}
		t, err := operatorv1.NewInstanceTypeServiceClient(conn).UpdateInstanceType(ctx, req)
		if err != nil {
			return err
		}
		return types.PrintOne(ctx, s, conn, t)
	})
	return c
}

func deleteCommand(s *session.Session) *cobra.Command {
	c := argCommand(s, "delete TYPE", "Delete an instance type")
	c.Long = "Delete an instance type. VMs that have the type keep their size."
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		if _, err := operatorv1.NewInstanceTypeServiceClient(conn).DeleteInstanceType(ctx, &operatorv1.DeleteInstanceTypeRequest{
			Name: name,
		}); err != nil {
			return err
		}
		return s.Done(name, "deleted")
	})
	return c
}

// argCommand returns a command with the single argument TYPE, and shell completion for it.
func argCommand(s *session.Session, use, short string) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: session.Exactly("TYPE")}
	c.ValidArgsFunction = session.FirstArg(types.Names(s))
	return c
}

func get(ctx context.Context, conn *dial.Conn, name string) (*operatorv1.InstanceType, error) {
	return operatorv1.NewInstanceTypeServiceClient(conn).GetInstanceType(ctx, &operatorv1.GetInstanceTypeRequest{Name: name})
}

// Find returns the instance type with this name, for a VM that is created with it or resized to it. It returns
// FAILED_PRECONDITION if the type is not available.
func Find(ctx context.Context, conn *dial.Conn, name string) (*operatorv1.InstanceType, error) {
	t, err := get(ctx, conn, name)
	if err == nil && !t.GetAvailable() {
		err = session.Errorf(codes.FailedPrecondition, "`trivet instance-type list` shows the types that are available",
			"the instance type %s is not available", name)
	}
	return t, err
}

// Names returns a shell completion with the names of the types.
func Names(s *session.Session) cobra.CompletionFunc { return types.Names(s) }

package vm

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/network"
	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// nicCommand returns the command `trivet vm nic`.
func nicCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "nic", Short: "Attach, detach and list the network interfaces of a VM", Args: cobra.NoArgs,
		Long: `Attach, detach and list the network interfaces (NICs) of a VM. Each NIC has a port, which has its address, MAC and
security groups: see ` + "`trivet network port list --vm VM`" + `.`,
		Example: `  trivet vm nic attach web --subnet front
  trivet vm nic list web
  trivet vm nic detach web nic1`,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(attachNICCommand(s), detachNICCommand(s), listNICsCommand(s))
	return c
}

func attachNICCommand(s *session.Session) *cobra.Command {
	var x nic
	var wait session.Waiting
	c := vmArgCommand(s, "attach VM", "Add a network interface to a VM")
	c.Long = `Add a network interface (NIC) to a VM, which may run. With --port, the NIC uses a port that exists and that nothing
else uses; the port stays when the NIC is detached. Otherwise the NIC gets a new port, which is deleted with the NIC:
in --subnet, or in the only subnet of --vpc, or in the project's default VPC.`
	c.Example = `  trivet vm nic attach web --subnet front --ip 10.0.1.10 --group web --group ssh
  trivet vm nic attach web --port web-1`
	p := c.Flags()
	p.StringVar(&x.subnet, "subnet", "", "subnet of a new port, by name or ID")
	p.StringVar(&x.vpc, "vpc", "", "VPC of a new port, by name or ID, if it has one subnet (default: the project's default VPC)")
	p.StringVar(&x.port, "port", "", "existing port, by name or ID")
	p.StringVar(&x.ip, "ip", "", "address of a new port (default: the lowest free one)")
	p.StringVar(&x.mac, "mac", "", "Ethernet address of a new port (default: derived from its ID)")
	p.StringSliceVar(&x.groups, "group", nil,
		`security groups of a new port, by name or ID, separated by commas (default: the group "default")`)
	p.StringVar(&x.model, "model", "virtio-net", "device that the guest sees: "+modelForm)
	p.StringVar(&x.id, "id", "", "ID of the NIC in the VM (default: the first free of nic0, nic1, ...)")
	wait.Add(c, true)
	session.Exclusive(c, "subnet", "vpc", "port")
	for flag, f := range map[string]cobra.CompletionFunc{
		"subnet": network.SubnetNames(s), "vpc": network.VPCNames(s), "port": network.PortNames(s), "group": network.GroupNames(s),
		"model": cobra.FixedCompletions([]string{"virtio-net", "e1000"}, cobra.ShellCompDirectiveNoFileComp),
	} {
		_ = c.RegisterFlagCompletionFunc(flag, f) // its only error is for an unknown flag
	}
	c.RunE = s.Run(startLimit, func(ctx context.Context, conn *dial.Conn, args []string) error {
		if err := x.check("--"); err != nil {
			return session.Usagef("%v", err)
		}
		return attachNIC(ctx, s, conn, args[0], x, &wait)
	})
	return c
}

func attachNIC(ctx context.Context, s *session.Session, conn *dial.Conn, nameOrID string, x nic, wait *session.Waiting) error {
	t, err := find(ctx, s, conn, nameOrID)
	if err != nil {
		return err
	}
	if x.id == "" {
		vm, err := t.read(ctx)
		if err != nil {
			return err
		}
		x.id = freeNICID(vm.GetSpec().GetNetwork())
	}
	resolver := network.NewResolver(ctx, s, conn)
	spec, err := x.spec(ctx, resolver)
	if err != nil {
		return err
	}
	vm, err := t.attachNIC(wait.Context(ctx), s, nameOrID, spec)
	if err != nil {
		return err
	}
	var attached []*vmv1.NetworkSpec
	for _, n := range vm.GetSpec().GetNetwork() {
		if n.GetId() == x.id {
			attached = append(attached, n)
		}
	}
	return s.Print(vm, []string{x.id}, func(w io.Writer) error {
		return list.Print(w, nicColumns(ctx, resolver, func() string { return t.id }), attached...)
	})
}

// attachNIC attaches a NIC to the VM, whose name or ID is nameOrID, and returns the VM.
func (t *target) attachNIC(ctx context.Context, s *session.Session, nameOrID string, nic *vmv1.NetworkSpec) (vm *vmv1.VirtualMachine, err error) {
	goesOn := session.Ongoing{What: nic.GetId() + " may still be attached", Look: "trivet vm nic list " + nameOrID}
	err = s.WaitOngoing("attaching "+nic.GetId(), goesOn, func(func(string)) error {
		vm, err = t.client.AttachNic(ctx, &vmv1.AttachNicRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id, Nic: nic})
		return err
	})
	return vm, err
}

func detachNICCommand(s *session.Session) *cobra.Command {
	var wait session.Waiting
	c := &cobra.Command{
		Use: "detach VM NIC", Short: "Remove a network interface from a VM", Args: session.Exactly("VM", "NIC"),
		Long: `Remove a network interface from a VM. NIC is its ID in the VM, such as nic0. A port that was made for the NIC is
deleted; one that was given with --port stays. A guest that runs must release the device.`,
		Example:           "  trivet vm nic list web\n  trivet vm nic detach web nic1",
		ValidArgsFunction: completeDevice(s, nicIDs),
	}
	wait.Add(c, true)
	c.RunE = runDetach(s, startLimit, &wait, nicIDs, func(ctx context.Context, _ *dial.Conn, t *target, id string) (*vmv1.VirtualMachine, string, error) {
		vm, err := t.client.DetachNic(ctx, &vmv1.DetachNicRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id, NicId: id})
		return vm, id, err
	})
	return c
}

func listNICsCommand(s *session.Session) *cobra.Command {
	c := vmArgCommand(s, "list VM", "List the network interfaces of a VM")
	var t *target
	var nics []*vmv1.NetworkSpec
	kind := &list.Kind[*vmv1.NetworkSpec]{
		Page: func(_ context.Context, _ *dial.Conn, q list.Query) ([]*vmv1.NetworkSpec, string, error) {
			return list.Slice(nics, q)
		},
		Name: (*vmv1.NetworkSpec).GetId,
		Columns: func(ctx context.Context, s *session.Session, conn *dial.Conn) []list.Column[*vmv1.NetworkSpec] {
			return nicColumns(ctx, network.NewResolver(ctx, s, conn), func() string { return t.id })
		},
	}
	f := kind.AddFlags(s, c)
	c.Long = `List the network interfaces (NICs) of a VM. STATUS is that of the NIC's port: ACTIVE after the host has installed
its rules.`
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		vm, of, err := readVM(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		t, nics = of, vm.GetSpec().GetNetwork()
		return kind.List(ctx, s, conn, f)
	})
	return c
}

func nicIDs(vm *vmv1.VirtualMachine) (ids []string) {
	for _, n := range vm.GetSpec().GetNetwork() {
		ids = append(ids, n.GetId())
	}
	return ids
}

// readVM returns the VM with a name or ID, and its target.
func readVM(ctx context.Context, s *session.Session, conn *dial.Conn, nameOrID string) (*vmv1.VirtualMachine, *target, error) {
	t, err := find(ctx, s, conn, nameOrID)
	if err != nil {
		return nil, nil, err
	}
	vm, err := t.read(ctx)
	return vm, t, err
}

// read returns the VM.
func (t *target) read(ctx context.Context) (*vmv1.VirtualMachine, error) {
	return t.client.GetVm(ctx, &vmv1.GetVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id})
}

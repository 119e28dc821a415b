package vm

import (
	"context"
	"maps"
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/instancetype"
	"github.com/trivet-cloud/trivet/cli/node"
	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// change holds the values of an update. Fields that are 0 or empty do not change the VM.
type change struct {
	labels, metadata map[string]string
	vcpus            uint32
	// sockets and cores are the topology of vcpus. If both are 0, the topology stays, or is the default one if vcpus
	// changes.
	sockets, cores uint32
	memoryMiB      uint64
	// If setHost is true, the VM is to be placed on host only, or, if host is nil, on any host.
	setHost bool
	host    *vmv1.Node
	// instanceType is the name of the instance type whose processors and memory the VM gets if vcpus and memoryMiB are 0.
	instanceType string
	// diskSizes has the new sizes in GiB of disks that are not volumes, by the ID of the disk.
	diskSizes map[string]uint64
}

// size holds the flags for processors and memory.
type size struct {
	instanceType string
	vcpus        uint32
	memory       string
}

func (x *size) add(s *session.Session, c *cobra.Command) {
	c.Flags().StringVar(&x.instanceType, "type", "", "instance type, for the processors and the memory that are not given")
	_ = c.RegisterFlagCompletionFunc("type", instancetype.Names(s)) // its only error is for an unknown flag
	c.Flags().Uint32Var(&x.vcpus, "vcpus", 0, "number of processors (default: as it is)")
	c.Flags().StringVar(&x.memory, "memory", "", "memory in MiB, or with a unit: 2G (default: as it is)")
}

// addTo sets the size in a change. It returns a *session.Usage error if a flag is invalid.
func (x *size) addTo(c *cobra.Command, to *change) error {
	if c.Flags().Changed("vcpus") && x.vcpus == 0 {
		return session.Usagef("--vcpus: want 1 or more")
	}
	if c.Flags().Changed("type") && x.instanceType == "" {
		return errNoTypeName()
	}
	to.vcpus, to.instanceType = x.vcpus, x.instanceType
	if x.memory == "" {
		return nil
	}
	mib, ok := session.Amount(x.memory, session.MiB)
	if !ok || mib == 0 {
		return session.Usagef("--memory %q: want a number of MiB, or one with a unit: 2G", x.memory)
	}
	to.memoryMiB = mib
	return nil
}

func errNoTypeName() error { return session.Usagef("--type: want the name of an instance type") }

func updateCommand(s *session.Session) *cobra.Command {
	var f policyFlags
	var x size
	c := vmArgCommand(s, "update VM", "Change the labels, the metadata, the processors and the memory of a VM")
	c.Long = `Change a VM, in any state. Labels and metadata that are not given stay. An empty value removes a pair. "trivet vm label"
changes labels, too. ` + sizeHelp + typeHelp + `

--host chooses the host for the next time that the VM is placed; the VM stays where it is until then. --host "" removes
the choice. The groups of a VM, such as --affinity, are fixed when it is created.`
	c.Example = `  trivet vm update web --metadata trivet/guest-exec=allowed
  trivet vm update web --restart-policy on-failure --ha restart --ha-priority 80
  trivet vm update web --host host-2
  trivet vm update web --label env=prod --label old=
  trivet vm update web --vcpus 4 --memory 8G
  trivet vm update web --type large`
	c.Flags().StringArrayVar(&f.labels, "label", nil, "KEY=VALUE, or KEY= to remove the label, repeatable")
	c.Flags().StringArrayVar(&f.metadata, "metadata", nil, "KEY=VALUE, or KEY= to remove the pair, repeatable")
	x.add(s, c)
	f.register(c.Flags())
	_ = c.RegisterFlagCompletionFunc("host", node.Names(s)) // its only error is for an unknown flag
	session.RequireOne(c, "label", "metadata", "type", "vcpus", "memory", "restart-policy", "ha", "ha-priority", "host")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) (err error) {
		var to change
		if to.labels, err = f.labelPairs(); err != nil {
			return err
		}
		if to.metadata, err = f.metadataPairs(); err != nil {
			return err
		}
		if err := x.addTo(c, &to); err != nil {
			return err
		}
		to.setHost = c.Flags().Changed("host")
		if to.host, err = f.findHost(ctx, conn); err != nil {
			return err
		}
		return to.apply(ctx, s, conn, args[0])
	})
	return c
}

// apply changes the VM with a name or ID, and prints it.
func (x *change) apply(ctx context.Context, s *session.Session, conn *dial.Conn, nameOrID string) error {
	t, err := find(ctx, s, conn, nameOrID)
	if err != nil {
		return err
	}
	if err := x.applyType(ctx, conn); err != nil {
		return err
	}
	vm, err := x.update(ctx, t)
	if err != nil {
		return err
	}
	if err := printVM(ctx, s, conn, vm); err != nil {
		return err
	}
	if pending := vm.GetMetadata()[cloud.PendingResize]; x.resizes() && pending != "" {
		s.Note("%s has %s at its next start or reboot", vm.GetName(), resizeText(pending))
	}
	if x.host != nil && vm.GetNodeId() != "" && vm.GetNodeId() != x.host.GetId() {
		s.Note("%s stays on its host until it is placed again, for example by `trivet vm migrate`", vm.GetName())
	}
	return nil
}

// update changes the VM, and returns it.
func (x *change) update(ctx context.Context, t *target) (*vmv1.VirtualMachine, error) {
	req := &vmv1.UpdateVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id, Labels: x.labels, Metadata: x.metadata}
	if x.resizes() || x.setHost || len(x.diskSizes) > 0 {
		vm, err := t.read(ctx)
		if err != nil {
			return nil, err
		}
		if x.resizes() {
			req.Spec = x.spec(vm.GetSpec())
		}
		if len(x.diskSizes) > 0 {
			if req.Spec == nil {
				req.Spec = &vmv1.VmSpec{}
			}
			req.Spec.Disks = withSizes(vm.GetSpec().GetDisks(), x.diskSizes)
		}
		if x.setHost {
			selector, err := withHost(vm.GetLabels()[cloud.NodeSelectorLabel], x.host.GetName())
			if err != nil {
				return nil, err
			}
			req.Labels = maps.Clone(x.labels)
			if req.Labels == nil {
				req.Labels = map[string]string{}
			}
			req.Labels[cloud.NodeSelectorLabel] = selector
		}
	}
	return t.client.UpdateVm(ctx, req)
}

// resizes reports whether the change has a number of processors or a size of the memory.
func (x *change) resizes() bool { return x.vcpus > 0 || x.memoryMiB > 0 }

// resizeText formats the value of cloud.PendingResize, such as "vcpus=4,memory_mib=2048", as "4 vCPUs, 2048 MiB of
// memory". It leaves other quantities as they are.
func resizeText(pending string) string {
	units := map[string]string{"vcpus": "vCPUs", "memory_mib": "MiB of memory"}
	parts := strings.Split(pending, ",")
	for i, part := range parts {
		key, value, _ := strings.Cut(part, "=")
		if unit, ok := units[key]; ok {
			parts[i] = value + " " + unit
		}
	}
	return strings.Join(parts, ", ")
}

// applyType sets the sizes that the change does not have to those of the instance type. If the VM then has the processors
// and the memory of the type, applyType adds the metadata that names the type. Otherwise the control plane removes this
// metadata when the size changes.
func (x *change) applyType(ctx context.Context, conn *dial.Conn) error {
	if x.instanceType == "" {
		return nil
	}
	t, err := instancetype.Find(ctx, conn, x.instanceType)
	if err != nil {
		return err
	}
	var typeName string
	if x.vcpus, x.memoryMiB, typeName = sizeOf(t, x.vcpus, x.memoryMiB); typeName != "" {
		x.metadata = cloud.Merge(x.metadata, map[string]string{cloud.InstanceTypeKey: typeName})
	}
	return nil
}

// spec returns the parts of the spec that change the size of a VM. A part that is given replaces the whole part, so it
// has the other fields of the present one.
func (x *change) spec(present *vmv1.VmSpec) *vmv1.VmSpec {
	spec := &vmv1.VmSpec{}
	if x.vcpus > 0 {
		// A topology of another number of processors is not kept.
		spec.Cpu = &vmv1.CpuSpec{Vcpus: x.vcpus, Sockets: x.sockets, CoresPerSocket: x.cores, CpuModel: present.GetCpu().GetCpuModel()}
		if x.vcpus == present.GetCpu().GetVcpus() && x.sockets == 0 && x.cores == 0 {
			spec.Cpu = present.GetCpu()
		}
	}
	if x.memoryMiB > 0 {
		spec.Memory = &vmv1.MemorySpec{SizeMib: x.memoryMiB, Hugepages: present.GetMemory().GetHugepages()}
	}
	return spec
}

func labelCommand(s *session.Session) *cobra.Command {
	c := vmArgCommand(s, "label VM KEY=VALUE|KEY-...", "Set and remove labels of a VM")
	c.Args = session.AtLeast("VM", "KEY=VALUE or KEY-")
	c.Long = "Set and remove labels of a VM. KEY=VALUE sets a label, and KEY- removes one. Other labels stay."
	c.Example = "  trivet vm label web env=prod team=shop\n  trivet vm label web old-"
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		labels, err := parseLabels(args[1:])
		if err != nil {
			return err
		}
		return (&change{labels: labels}).apply(ctx, s, conn, args[0])
	})
	return c
}

// parseLabels parses KEY=VALUE and KEY-, which removes a label: its value in the result is empty.
func parseLabels(args []string) (map[string]string, error) {
	labels := map[string]string{}
	for _, arg := range args {
		key, value, set := strings.Cut(arg, "=")
		removed := false
		if !set {
			key, removed = strings.CutSuffix(arg, "-")
		}
		_, twice := labels[key]
		switch {
		case key == "" || !set && !removed:
			return nil, session.Usagef("%q: want KEY=VALUE to set a label, or KEY- to remove one", arg)
		case set && value == "":
			return nil, session.Usagef("%q: a label has a value; %s- removes it", arg, key)
		case twice:
			return nil, session.Usagef("the label %q is given twice", key)
		}
		labels[key] = value
	}
	return labels, nil
}

package vm

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func resizeCommand(s *session.Session) *cobra.Command {
	var vcpus uint32
	var memory string
	c := vmArgCommand(s, "resize VM", "Change the processors and the memory of a VM")
	c.Long = `Change the processors and the memory of a VM. The host of the VM must have room for the new size.

A VM that is STOPPED has the new size at once. A VM that runs gets it at its next start or reboot. Until then,
"trivet vm show" shows it as "At the next start", and the larger of both sizes counts in the quota. To take a resize back,
resize the VM to its present size.`
	c.Example = `  trivet vm resize web --vcpus 4 --memory 8G
  trivet vm reboot web`
	c.Flags().Uint32Var(&vcpus, "vcpus", 0, "number of processors (default: as it is)")
	c.Flags().StringVar(&memory, "memory", "", "memory in MiB, or with a unit: 2G (default: as it is)")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		mib, ok := uint64(0), true
		if memory != "" {
			mib, ok = session.Amount(memory, session.MiB)
		}
		switch {
		case !ok || memory != "" && mib == 0:
			return session.Usagef("--memory %q: want a number of MiB, or one with a unit: 2G", memory)
		case c.Flags().Changed("vcpus") && vcpus == 0:
			return session.Usagef("--vcpus: want 1 or more")
		case vcpus == 0 && mib == 0:
			return session.Usagef("want --vcpus, --memory or both")
		}
		return resize(ctx, s, conn, args[0], vcpus, mib)
	})
	return c
}

// resize changes the number of processors unless vcpus is 0, and the memory unless mib is 0.
func resize(ctx context.Context, s *session.Session, conn *dial.Conn, nameOrID string, vcpus uint32, mib uint64) error {
	vm, t, err := readVM(ctx, s, conn, nameOrID)
	if err != nil {
		return err
	}
	spec := &vmv1.VmSpec{}
	if vcpus > 0 {
		// A topology of another number of processors is not kept.
		spec.Cpu = &vmv1.CpuSpec{Vcpus: vcpus, CpuModel: vm.GetSpec().GetCpu().GetCpuModel()}
		if vcpus == vm.GetSpec().GetCpu().GetVcpus() {
			spec.Cpu = vm.GetSpec().GetCpu()
		}
	}
	if mib > 0 {
		spec.Memory = &vmv1.MemorySpec{SizeMib: mib, Hugepages: vm.GetSpec().GetMemory().GetHugepages()}
	}
	vm, err = t.client.UpdateVm(ctx, &vmv1.UpdateVmRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id, Spec: spec})
	if err != nil {
		return err
	}
	if err := s.Print(vm, []string{vm.GetName()}, func(w io.Writer) error { return rows(w, s.Now(), vm) }); err != nil {
		return err
	}
	if pending := vm.GetMetadata()[cloud.PendingResize]; pending != "" {
		s.Note("%s has %s at its next start or reboot", vm.GetName(), pending)
	}
	return nil
}

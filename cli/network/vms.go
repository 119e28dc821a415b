package network

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/vm/lookup"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

const vmPrefix = "vm:"

// vms looks up VMs for flags, and their names for output.
type vms struct{}

func (vms) find(ctx context.Context, t *target, nameOrID string) (string, error) {
	return lookup.Find(ctx, t.s, t.conn, nameOrID)
}

func (vms) complete(s *session.Session) cobra.CompletionFunc { return lookup.Names(s) }

func (vms) kindName() string { return "VM" }

func (vms) nameByID(ctx context.Context, t *target, id string) (string, error) {
	vm, err := vmv1.NewVmServiceClient(t.conn).GetVm(ctx, &vmv1.GetVmRequest{OrgId: t.org, ProjectId: t.project, VmId: id})
	return vm.GetName(), err
}

func (vms) names(ctx context.Context, t *target) (map[string]string, error) {
	all, _, err := lookup.All(ctx, t.s, t.conn, "", 0)
	return vmNames(all), err
}

func (vms) namesInAll(ctx context.Context, t *target) (map[string]string, error) {
	all, _, err := lookup.AllProjects(ctx, t.s, t.conn, "", 0)
	return vmNames(all), err
}

func vmNames(all []*vmv1.VirtualMachine) map[string]string {
	names := map[string]string{}
	for _, vm := range all {
		names[vm.GetId()] = vm.GetName()
	}
	return names
}

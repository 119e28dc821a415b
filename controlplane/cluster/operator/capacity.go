package operator

import (
	"context"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func (s *server) GetCapacity(ctx context.Context, _ *operatorv1.GetCapacityRequest) (*operatorv1.GetCapacityResponse, error) {
	if _, err := auth.Admit(ctx, service+"GetCapacity", "", ""); err != nil {
		return nil, err
	}
	hosts, err := s.opts.VMs.Capacity(ctx)
	if err != nil {
		return nil, err
	}
	out := &operatorv1.GetCapacityResponse{
		Capacity: &operatorv1.Resources{}, Allocatable: &operatorv1.Resources{}, Allocated: &operatorv1.Resources{}, AnyHostCanBeLost: true,
	}
	for _, h := range hosts {
		say := &operatorv1.HostCapacity{
			NodeId: string(h.ID), Name: h.Name, State: h.State.String(),
			Capacity: resourcesOf(h.Capacity), Allocatable: resourcesOf(h.Allocatable), Allocated: resourcesOf(h.Allocated),
		}
		if l := h.Loss; l != nil {
			say.Loss = &operatorv1.HostLoss{
				Vms: uint32(l.VMs), Recovered: uint32(l.Recovered), Waiting: uint32(l.Waiting), FirstWaiting: l.First, Reason: l.Reason,
			}
			out.AnyHostCanBeLost = out.AnyHostCanBeLost && l.Waiting == 0
		}
		addTo(out.Capacity, say.Capacity)
		addTo(out.Allocatable, say.Allocatable)
		addTo(out.Allocated, say.Allocated)
		out.Hosts = append(out.Hosts, say)
	}
	return out, nil
}

func resourcesOf(c cloud.Capacity) *operatorv1.Resources {
	return &operatorv1.Resources{Vcpus: uint64(c.VCPUs), MemoryMib: c.MemoryMiB, StorageGib: c.StorageGiB, HugepagesMib: c.HugepagesMiB,
		DedicatedVcpus: uint64(c.DedicatedVCPUs)}
}

func addTo(sum, r *operatorv1.Resources) {
	sum.Vcpus += r.Vcpus
	sum.MemoryMib += r.MemoryMib
	sum.StorageGib += r.StorageGib
	sum.HugepagesMib += r.HugepagesMib
	sum.DedicatedVcpus += r.DedicatedVcpus
}

func (s *server) RebalanceCluster(ctx context.Context, in *operatorv1.RebalanceClusterRequest) (*operatorv1.RebalanceClusterResponse, error) {
	if _, err := auth.Admit(ctx, service+"RebalanceCluster", "", ""); err != nil {
		return nil, err
	}
	plan, err := s.opts.VMs.Rebalance(ctx, vm.RebalanceRequest{DryRun: in.GetDryRun(), Most: int(in.GetMaxMoves())})
	if err != nil {
		return nil, err
	}
	out := &operatorv1.RebalanceClusterResponse{
		HighestBefore: plan.Before.Highest, LowestBefore: plan.Before.Lowest, HighestAfter: plan.After.Highest, LowestAfter: plan.After.Lowest,
	}
	for _, m := range plan.Moves {
		t := plan.Tenants[m.VM]
		out.Moves = append(out.Moves, &operatorv1.Move{
			VmId: string(m.VM), VmName: m.Name, OrgId: string(t.Org), ProjectId: string(t.Project), FromNodeId: string(m.From), From: plan.Hosts[m.From],
			ToNodeId: string(m.To), To: plan.Hosts[m.To], Before: m.Before, After: m.After,
		})
	}
	return out, nil
}

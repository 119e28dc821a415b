package main

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
)

func (c *fakeCloud) GetCapacity(context.Context, *operatorv1.GetCapacityRequest) (*operatorv1.GetCapacityResponse, error) {
	r := func(vcpus, memory, storage uint64) *operatorv1.Resources {
		return &operatorv1.Resources{Vcpus: vcpus, MemoryMib: memory, StorageGib: storage}
	}
	return &operatorv1.GetCapacityResponse{
		Hosts: []*operatorv1.HostCapacity{
			{NodeId: "id-1", Name: "host-1", State: "READY", Capacity: r(16, 65536, 500), Allocatable: r(64, 61440, 450), Allocated: r(30, 30720, 100),
				Loss: &operatorv1.HostLoss{Vms: 9, Recovered: 5, Waiting: 2, FirstWaiting: "db", Reason: "host-2 has 1 vCPUs free, 4 needed"}},
			{NodeId: "id-2", Name: "host-2", State: "READY", Capacity: r(16, 65536, 500), Allocatable: r(64, 61440, 450), Allocated: r(63, 30720, 100),
				Loss: &operatorv1.HostLoss{Vms: 3, Recovered: 3}},
			{NodeId: "id-3", Name: "host-3", State: "NOT_READY", Capacity: r(16, 65536, 500), Allocatable: r(64, 61440, 450), Allocated: r(0, 0, 0)},
		},
		Capacity: r(48, 196608, 1500), Allocatable: r(192, 184320, 1350), Allocated: r(93, 61440, 200),
	}, nil
}

func (c *fakeCloud) RebalanceCluster(_ context.Context, in *operatorv1.RebalanceClusterRequest) (*operatorv1.RebalanceClusterResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, fmt.Sprintf("  dry_run=%v max_moves=%d", in.GetDryRun(), in.GetMaxMoves()))
	if !in.GetDryRun() {
		return nil, status.Error(codes.FailedPrecondition, "VM web was not migrated: the guest is busy")
	}
	return &operatorv1.RebalanceClusterResponse{
		Moves:         []*operatorv1.Move{{VmId: "vm-1", VmName: "web", From: "host-2", To: "host-1", Before: 0.98, After: 0.61}},
		HighestBefore: 0.98, LowestBefore: 0.2, HighestAfter: 0.61, LowestAfter: 0.4,
	}, nil
}

package main

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// MigrateVm begins a migration, which ends after one call of GetMigration. Without a destination it fails then.
func (c *fakeCloud) MigrateVm(_ context.Context, in *vmv1.MigrateVmRequest) (*vmv1.VirtualMachine, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, "  "+oneLine(in))
	for _, vm := range c.vms {
		if vm.GetId() == in.GetVmId() {
			vm.State = vmv1.VmState_VM_STATE_MIGRATING
			c.migration = &operatorv1.Migration{
				Attempt: 4, SourceNodeId: vm.GetNodeId(), TargetNodeId: "host-2", Phase: "TRANSFER", BeganAt: now.UnixMilli(),
				TotalBytes: 2 << 30, SentBytes: 1 << 30, Reason: in.GetDestinationNodeId(),
			}
			return vm, nil
		}
	}
	return nil, failed(codes.NotFound, "", "no VM %s", in.GetVmId())
}

func (c *fakeCloud) GetMigration(_ context.Context, in *operatorv1.GetMigrationRequest) (*operatorv1.GetMigrationResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.migration
	if m == nil {
		return &operatorv1.GetMigrationResponse{}, nil
	}
	out := proto.Clone(m).(*operatorv1.Migration)
	if m.Phase != "" {
		moved := m.Reason != ""
		m.Phase, m.EndedAt, m.Moved, m.DowntimeMs = "", now.Add(time.Minute).UnixMilli(), moved, 120
		if m.Reason = ""; !moved {
			m.Reason = "no space on the target"
		}
		for _, vm := range c.vms {
			if vm.GetId() == in.GetVmId() {
				if vm.State = vmv1.VmState_VM_STATE_RUNNING; moved {
					vm.NodeId = m.TargetNodeId
				}
			}
		}
	}
	return &operatorv1.GetMigrationResponse{Migration: out}, nil
}

func (c *fakeCloud) CancelMigration(_ context.Context, in *operatorv1.CancelMigrationRequest) (*operatorv1.CancelMigrationResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, "  "+oneLine(in))
	return &operatorv1.CancelMigrationResponse{}, nil
}

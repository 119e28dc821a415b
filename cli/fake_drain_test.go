package main

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// DrainNode begins the drain of a host. The drain of a host with the label stuck ends at once without success. That of a
// host with the label vms ends after one call of GetDrain, and that of another host at once.
func (c *fakeCloud) DrainNode(_ context.Context, in *vmv1.DrainNodeRequest) (*vmv1.Node, error) {
	n, err := c.node(in.GetNodeId(), vmv1.NodeState_NODE_STATE_DRAINING)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, "  "+oneLine(in))
	d := &operatorv1.Drain{Phase: "EMPTY", RequestedBy: "root", Force: in.GetForce(), BeganAt: now.UnixMilli(), EndedAt: now.UnixMilli(), Result: "no VM runs on the host"}
	switch {
	case n.GetLabels()["stuck"] != "":
		d.Phase, d.Result = "INCOMPLETE", "timeout: 1 VMs are still on the host: db has a TPM"
	case n.GetLabels()["vms"] != "":
		d.Phase, d.EndedAt, d.Result, d.Deadline = "MOVING", 0, "", now.UnixMilli()+3_600_000
		d.Vms = []*operatorv1.DrainedVm{
			{VmId: "vm-1", Name: "web", OrgId: "acme", ProjectId: "web", Status: "MOVING", To: "host-2", TotalBytes: 200, SentBytes: 50},
			{VmId: "vm-2", Name: "db", OrgId: "acme", ProjectId: "web", Status: "CANNOT_MOVE", Reason: "has a TPM"},
			{VmId: "vm-3", Name: "off", OrgId: "acme", ProjectId: "web", Status: "STAYS", Reason: "is STOPPED and stays on this host"},
			{VmId: "vm-4", Name: "gone", OrgId: "acme", ProjectId: "web", Status: "MOVED", To: "host-3"},
		}
	}
	if c.drains == nil {
		c.drains = map[string]*operatorv1.Drain{}
	}
	c.drains[n.GetId()] = d
	return n, nil
}

func (c *fakeCloud) GetDrain(_ context.Context, in *operatorv1.GetDrainRequest) (*operatorv1.GetDrainResponse, error) {
	if _, err := c.node(in.GetNodeId(), 0); err != nil {
		return nil, err
	}
	c.mu.Lock()
	d := c.drains[in.GetNodeId()]
	if d.GetPhase() == "EMPTY" {
		c.boots++
	}
	out := &operatorv1.GetDrainResponse{BootId: fmt.Sprint("boot-", c.boots)}
	if d != nil {
		out.Drain = proto.Clone(d).(*operatorv1.Drain)
		if d.Phase == "MOVING" {
			d.Phase, d.EndedAt, d.Result = "EMPTY", now.UnixMilli(), "no VM runs on the host"
			d.Vms[0].Status, d.Vms[0].TotalBytes, d.Vms[1].Status = "MOVED", 0, "SHUT_DOWN"
		}
	}
	c.mu.Unlock()
	switch out.GetDrain().GetPhase() {
	case "EMPTY":
		c.node(in.GetNodeId(), vmv1.NodeState_NODE_STATE_MAINTENANCE)
	case "INCOMPLETE":
		c.node(in.GetNodeId(), vmv1.NodeState_NODE_STATE_CORDONED)
	}
	return out, nil
}

func (c *fakeCloud) CancelDrain(_ context.Context, in *operatorv1.CancelDrainRequest) (*operatorv1.CancelDrainResponse, error) {
	if _, err := c.node(in.GetNodeId(), vmv1.NodeState_NODE_STATE_CORDONED); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if d := c.drains[in.GetNodeId()]; d != nil {
		d.Phase, d.Result = "INCOMPLETE", "cancelled by root"
	}
	return &operatorv1.CancelDrainResponse{}, nil
}

func (c *fakeCloud) endDrain(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.drains, id)
}

package main

import (
	"context"
	"fmt"

	"google.golang.org/grpc"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	faults "github.com/trivet-cloud/trivet/shared/fault"
)

// saw adds a line about the fields of a request to the lines that the script command "calls" prints.
func (c *fakeCloud) saw(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, fmt.Sprintf("  "+format, args...))
}

func (c *fakeCloud) AddMember(_ context.Context, in *operatorv1.AddMemberRequest) (*operatorv1.AddMemberResponse, error) {
	c.saw("id=%d name=%s at=%s clients=%v learner=%t", in.GetId(), in.GetName(), in.GetRaftAddr(), in.GetClientUrls(), in.GetLearner())
	m := &operatorv1.Member{Id: in.GetId(), Name: "node-4", Address: in.GetRaftAddr(), State: "WAITING", Wanted: "VOTER"}
	return &operatorv1.AddMemberResponse{Member: m, Members: []*operatorv1.Member{m}}, nil
}

func (c *fakeCloud) PromoteMember(_ context.Context, in *operatorv1.PromoteMemberRequest) (*operatorv1.PromoteMemberResponse, error) {
	c.saw("id=%d", in.GetId())
	return &operatorv1.PromoteMemberResponse{}, nil
}

func (c *fakeCloud) RemoveMember(_ context.Context, in *operatorv1.RemoveMemberRequest) (*operatorv1.RemoveMemberResponse, error) {
	c.saw("id=%d force=%t", in.GetId(), in.GetForce())
	if !in.GetForce() {
		return nil, faults.New(faults.FailedPrecondition, "one voter would be left, which could not fail: an operator may remove it by force")
	}
	return &operatorv1.RemoveMemberResponse{}, nil
}

func (c *fakeCloud) ReplaceMember(_ context.Context, in *operatorv1.ReplaceMemberRequest) (*operatorv1.ReplaceMemberResponse, error) {
	c.saw("id=%d force=%t", in.GetId(), in.GetForce())
	return &operatorv1.ReplaceMemberResponse{}, nil
}

func (c *fakeCloud) TransferLeader(_ context.Context, in *operatorv1.TransferLeaderRequest) (*operatorv1.TransferLeaderResponse, error) {
	c.saw("id=%d", in.GetId())
	return &operatorv1.TransferLeaderResponse{}, nil
}

func (c *fakeCloud) BackupCluster(_ *operatorv1.BackupClusterRequest, stream grpc.ServerStreamingServer[operatorv1.BackupClusterResponse]) error {
	for range 3 {
		if err := stream.Send(&operatorv1.BackupClusterResponse{Data: make([]byte, 1000)}); err != nil {
			return err
		}
	}
	return nil
}

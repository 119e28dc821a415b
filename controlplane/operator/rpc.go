// Package operator serves operator.v1: what those who run the cloud ask of it, and the console log. It keeps nothing of
// its own.
package operator

import (
	"context"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	"github.com/trivet-cloud/trivet/controlplane/auth"
	"github.com/trivet-cloud/trivet/controlplane/consensus"
	"github.com/trivet-cloud/trivet/controlplane/node"
	"github.com/trivet-cloud/trivet/controlplane/vm"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Options of the service; all are required.
type Options struct {
	Version string
	Cluster string
	// Members are the addresses of all members.
	Members map[uint64]string
	Runner  *consensus.Runner
	// Groups names the raft groups and gives the revision of each.
	Groups map[uint64]Group
	// ElectionTicks without a word from a member make it unreachable.
	ElectionTicks uint64
	Nodes         *node.Service
	VMs           *vm.Service
}

// Group is a raft group as an operator knows it.
type Group struct {
	Name     string
	Revision func() int64
}

// Register adds OperatorService.
func Register(g *grpc.Server, opts Options) {
	operatorv1.RegisterOperatorServiceServer(g, &server{opts: opts})
}

type server struct {
	operatorv1.UnsafeOperatorServiceServer
	opts Options
}

const service = "/operator.v1.OperatorService/"

func (s *server) ClusterStatus(ctx context.Context, _ *operatorv1.ClusterStatusRequest) (*operatorv1.ClusterStatusResponse, error) {
	if _, err := auth.Admit(ctx, service+"ClusterStatus", "", ""); err != nil {
		return nil, err
	}
	status, err := s.opts.Runner.Status(ctx)
	if err != nil {
		return nil, err
	}
	out := &operatorv1.ClusterStatusResponse{Version: s.opts.Version, Cluster: s.opts.Cluster, MemberId: status.ID}
	for _, id := range slices.Sorted(maps.Keys(s.opts.Members)) {
		heard, known := status.Heard[id]
		out.Members = append(out.Members, &operatorv1.Member{
			Id: id, Address: s.opts.Members[id], Reachable: id == status.ID || known && heard <= s.opts.ElectionTicks,
		})
	}
	for _, g := range status.Groups {
		say := &operatorv1.Group{Id: g.ID, LeaderId: g.Leader, Term: g.Term, CommittedIndex: g.Commit, AppliedIndex: g.Applied}
		if info, ok := s.opts.Groups[g.ID]; ok {
			say.Name, say.Revision = info.Name, info.Revision()
		}
		out.Groups = append(out.Groups, say)
	}
	return out, nil
}

func (s *server) CreateNodeToken(ctx context.Context, in *operatorv1.CreateNodeTokenRequest) (*operatorv1.CreateNodeTokenResponse, error) {
	if _, err := auth.Admit(ctx, service+"CreateNodeToken", "", ""); err != nil {
		return nil, err
	}
	token, expires, err := s.opts.Nodes.NewToken(ctx, in.GetName(), time.Duration(in.GetTtlSeconds())*time.Second)
	if err != nil {
		return nil, err
	}
	return &operatorv1.CreateNodeTokenResponse{Token: token, ExpiresAt: expires}, nil
}

func (s *server) ReadConsoleLog(in *operatorv1.ReadConsoleLogRequest, stream grpc.ServerStreamingServer[operatorv1.ReadConsoleLogResponse]) error {
	t, err := auth.Admit(stream.Context(), service+"ReadConsoleLog", in.GetOrgId(), in.GetProjectId())
	if err != nil {
		return err
	}
	return s.opts.VMs.Console(stream.Context(), t, cloud.VMID(in.GetVmId()), in.GetFollow(), in.GetTailBytes(), func(b []byte) error {
		return stream.Send(&operatorv1.ReadConsoleLogResponse{Data: b})
	})
}

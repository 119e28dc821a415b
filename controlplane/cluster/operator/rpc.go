// Package operator implements the gRPC API operator.v1: the calls for operators of the cloud, and ReadConsoleLog. It
// stores nothing.
package operator

import (
	"context"
	"time"

	"google.golang.org/grpc"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	"github.com/trivet-cloud/trivet/controlplane/cluster/jointoken"
	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/records/diskspace"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Options configures New. All fields are required.
type Options struct {
	Version string
	Cluster string
	// Members lists and changes the members of the cluster.
	Members  *membership.Service
	Runner   *consensus.Runner
	Commands *leader.Commands
	// Groups holds the name and the function Revision of each raft group, by ID.
	Groups map[uint64]Group
	// ElectionTicks is a number of raft ticks. A member that has sent no message for more ticks than that counts as
	// unreachable.
	ElectionTicks uint64
	Nodes         *node.Service
	Invites       *jointoken.Service
	VMs           *vm.Service
	// Versions returns the versions of the programs of the members that answer, by member ID.
	Versions func(ctx context.Context) map[uint64]string
	// Disks returns the disk space of the members that recently reported it, by member ID.
	Disks func() map[uint64]diskspace.Space
	// Backup creates an archive of all raft groups and passes it in parts to the function write. If write returns an
	// error, Backup returns the same error.
	Backup func(ctx context.Context, write func([]byte) error) error
}

// Group describes a raft group. Name is its name, and Revision returns the revision of the group's data on this member.
type Group struct {
	Name     string
	Revision func() int64
}

// New returns a Service, and registers heardCommand with opts.Commands.
func New(opts Options) *Service {
	s := &Service{server{opts: opts}}
	leader.Register(opts.Commands, &s.server, heardCommand)
	return s
}

// Service implements OperatorService.
type Service struct{ server server }

// Register registers OperatorService with g.
func (s *Service) Register(g grpc.ServiceRegistrar) {
	operatorv1.RegisterOperatorServiceServer(g, &s.server)
}

type server struct {
	operatorv1.UnsafeOperatorServiceServer
	opts Options
}

// heardCommand calls heard on the leader of the system group.
var heardCommand = leader.NewCommand("operator.heard", leader.Repeatable, (*server).heard)

// heard reports, for each member, whether this member has received a message from it within the last ElectionTicks.
// Only the leader receives messages from all members; a follower receives them only from the leader.
func (s *server) heard(ctx context.Context, _ struct{}) (map[uint64]bool, error) {
	status, err := s.opts.Runner.Status(ctx)
	if err != nil {
		return nil, err
	}
	out := map[uint64]bool{status.ID: true}
	for id, ticks := range status.Heard {
		out[id] = ticks <= s.opts.ElectionTicks
	}
	return out, nil
}

// reachable reports, for each member, whether the leader has recently received a message from it (see heard). If the
// leader does not respond within askLeader, reachable reports from which members this member has received messages.
func (s *server) reachable(ctx context.Context) (map[uint64]bool, error) {
	ask, cancel := context.WithTimeout(ctx, askLeader)
	defer cancel()
	if heard, err := heardCommand.Call(ask, s.opts.Commands, struct{}{}); err == nil {
		return heard, nil
	}
	return s.heard(ctx, struct{}{})
}

// askLeader is the timeout of a request to the leader. It is short, because ClusterStatus must also respond without a
// leader.
const askLeader = time.Second

const service = "/operator.v1.OperatorService/"

func (s *server) ClusterStatus(ctx context.Context, _ *operatorv1.ClusterStatusRequest) (*operatorv1.ClusterStatusResponse, error) {
	if _, err := auth.Admit(ctx, service+"ClusterStatus", "", ""); err != nil {
		return nil, err
	}
	status, err := s.opts.Runner.Status(ctx)
	if err != nil {
		return nil, err
	}
	reachable, err := s.reachable(ctx)
	if err != nil {
		return nil, err
	}
	out := &operatorv1.ClusterStatusResponse{Version: s.opts.Version, Cluster: s.opts.Cluster, MemberId: status.ID}
	members, err := s.opts.Members.List(ctx, true)
	if err != nil {
		return nil, err
	}
	disks, versions := s.opts.Disks(), s.opts.Versions(ctx)
	for _, m := range members {
		say := memberOf(m)
		say.Reachable = m.ID == status.ID || reachable[m.ID]
		disk := disks[m.ID]
		say.DiskFreeBytes, say.DiskSizeBytes, say.DiskLow, say.Version = disk.Free, disk.Size, disk.Low, versions[m.ID]
		out.Members = append(out.Members, say)
	}
	for _, g := range status.Groups {
		say := &operatorv1.Group{Id: g.ID, LeaderId: g.Leader, Term: g.Term, CommittedIndex: g.Commit, AppliedIndex: g.Applied}
		if info, ok := s.opts.Groups[g.ID]; ok {
			say.Name, say.Revision = info.Name, info.Revision()
		}
		s.look(ctx, say, g)
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

func (s *server) FenceNode(ctx context.Context, in *operatorv1.FenceNodeRequest) (*operatorv1.FenceNodeResponse, error) {
	if _, err := auth.Admit(ctx, service+"FenceNode", "", ""); err != nil {
		return nil, err
	}
	vms, err := s.opts.Nodes.FenceByHand(ctx, cloud.NodeID(in.GetNodeId()), in.GetConfirmedOff())
	if err != nil {
		return nil, err
	}
	return &operatorv1.FenceNodeResponse{Vms: uint32(vms)}, nil
}

func (s *server) EvictNode(ctx context.Context, in *operatorv1.EvictNodeRequest) (*operatorv1.EvictNodeResponse, error) {
	if _, err := auth.Admit(ctx, service+"EvictNode", "", ""); err != nil {
		return nil, err
	}
	vms, err := s.opts.Nodes.Evict(ctx, cloud.NodeID(in.GetNodeId()), in.GetForce())
	if err != nil {
		return nil, err
	}
	return &operatorv1.EvictNodeResponse{Vms: uint32(vms)}, nil
}

func (s *server) BanNode(ctx context.Context, in *operatorv1.BanNodeRequest) (*operatorv1.BanNodeResponse, error) {
	if _, err := auth.Admit(ctx, service+"BanNode", "", ""); err != nil {
		return nil, err
	}
	made, err := s.opts.Nodes.Ban(ctx, cloud.NodeID(in.GetNodeId()), in.GetKey(), in.GetReason())
	if err != nil {
		return nil, err
	}
	out := &operatorv1.BanNodeResponse{}
	for _, b := range made {
		out.Bans = append(out.Bans, banOf(&b))
	}
	return out, nil
}

func (s *server) UnbanNode(ctx context.Context, in *operatorv1.UnbanNodeRequest) (*operatorv1.UnbanNodeResponse, error) {
	if _, err := auth.Admit(ctx, service+"UnbanNode", "", ""); err != nil {
		return nil, err
	}
	if err := s.opts.Nodes.Unban(ctx, cloud.NodeID(in.GetNodeId()), in.GetKey()); err != nil {
		return nil, err
	}
	return &operatorv1.UnbanNodeResponse{}, nil
}

func (s *server) ListBans(ctx context.Context, in *operatorv1.ListBansRequest) (*operatorv1.ListBansResponse, error) {
	if _, err := auth.Admit(ctx, service+"ListBans", "", ""); err != nil {
		return nil, err
	}
	page, next, err := s.opts.Nodes.Bans(ctx, in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &operatorv1.ListBansResponse{NextPageToken: next}
	for _, b := range page {
		out.Bans = append(out.Bans, banOf(b))
	}
	return out, nil
}

func banOf(b *node.Ban) *operatorv1.Ban {
	return &operatorv1.Ban{Key: b.Key, NodeId: string(b.Node), Name: b.Name, Reason: b.Reason, BannedAt: b.At}
}

func (s *server) CreateMemberToken(ctx context.Context, in *operatorv1.CreateMemberTokenRequest) (*operatorv1.CreateMemberTokenResponse, error) {
	if _, err := auth.Admit(ctx, service+"CreateMemberToken", "", ""); err != nil {
		return nil, err
	}
	token, expires, err := s.opts.Invites.NewToken(ctx, time.Duration(in.GetTtlSeconds())*time.Second)
	if err != nil {
		return nil, err
	}
	return &operatorv1.CreateMemberTokenResponse{Token: token, ExpiresAt: expires}, nil
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

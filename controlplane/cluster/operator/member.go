package operator

import (
	"context"
	"maps"
	"net/url"
	"slices"

	"google.golang.org/grpc"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func memberOf(m membership.Member) *operatorv1.Member {
	out := &operatorv1.Member{
		Id: m.ID, Address: m.RaftAddr, Name: m.Name, RaftAddr: m.RaftAddr, ClientUrls: m.ClientURLs, State: string(m.State), Wanted: string(m.Wanted),
	}
	if u, err := url.Parse(m.RaftAddr); err == nil && u.Hostname() != "" {
		out.Address = u.Hostname()
	}
	return out
}

func membersOf(all []membership.Member) (out []*operatorv1.Member) {
	for _, m := range all {
		out = append(out, memberOf(m))
	}
	return out
}

// look sets the voters, the learners and the progress in the response say, as the group's leader reports them. If the
// leader does not respond within askLeader, look uses the parameter own, the status of the group on this member.
func (s *server) look(ctx context.Context, say *operatorv1.Group, own consensus.GroupStatus) {
	limited, cancel := context.WithTimeout(ctx, askLeader)
	defer cancel()
	g, err := s.opts.Members.Look(limited, own.ID)
	if err != nil {
		g = own
	}
	say.Voters, say.Learners = g.Voters, g.Learners
	for _, id := range slices.Sorted(maps.Keys(g.Match)) {
		say.Progress = append(say.Progress, &operatorv1.Progress{MemberId: id, MatchIndex: g.Match[id], Active: g.Active[id]})
	}
}

// admitted checks that the caller may call a method about a member. It returns InvalidArgument if the member's ID is 0.
func admitted(ctx context.Context, method auth.Method, id uint64) error {
	if _, err := auth.Admit(ctx, service+method, "", ""); err != nil {
		return err
	}
	if id == 0 {
		return fault.Invalid("id", "is required")
	}
	return nil
}

func (s *server) AddMember(ctx context.Context, in *operatorv1.AddMemberRequest) (*operatorv1.AddMemberResponse, error) {
	if _, err := auth.Admit(ctx, service+"AddMember", "", ""); err != nil {
		return nil, err
	}
	added, all, err := s.opts.Members.Add(ctx, membership.AddRequest{
		ID: in.GetId(), Name: in.GetName(), RaftAddr: in.GetRaftAddr(), ClientURLs: in.GetClientUrls(), Learner: in.GetLearner(),
	})
	if err != nil {
		return nil, err
	}
	return &operatorv1.AddMemberResponse{Member: memberOf(added), Members: membersOf(all)}, nil
}

func (s *server) PromoteMember(ctx context.Context, in *operatorv1.PromoteMemberRequest) (*operatorv1.PromoteMemberResponse, error) {
	if err := admitted(ctx, "PromoteMember", in.GetId()); err != nil {
		return nil, err
	}
	all, err := s.opts.Members.Promote(ctx, in.GetId())
	if err != nil {
		return nil, err
	}
	return &operatorv1.PromoteMemberResponse{Members: membersOf(all)}, nil
}

func (s *server) RemoveMember(ctx context.Context, in *operatorv1.RemoveMemberRequest) (*operatorv1.RemoveMemberResponse, error) {
	if err := admitted(ctx, "RemoveMember", in.GetId()); err != nil {
		return nil, err
	}
	all, err := s.opts.Members.Remove(ctx, in.GetId(), in.GetForce())
	if err != nil {
		return nil, err
	}
	return &operatorv1.RemoveMemberResponse{Members: membersOf(all)}, nil
}

func (s *server) ReplaceMember(ctx context.Context, in *operatorv1.ReplaceMemberRequest) (*operatorv1.ReplaceMemberResponse, error) {
	if err := admitted(ctx, "ReplaceMember", in.GetId()); err != nil {
		return nil, err
	}
	all, err := s.opts.Members.Replace(ctx, in.GetId(), in.GetForce())
	if err != nil {
		return nil, err
	}
	out := &operatorv1.ReplaceMemberResponse{}
	for _, m := range all {
		if m.ID == in.GetId() {
			out.Member = memberOf(m)
		}
	}
	return out, nil
}

func (s *server) TransferLeader(ctx context.Context, in *operatorv1.TransferLeaderRequest) (*operatorv1.TransferLeaderResponse, error) {
	if err := admitted(ctx, "TransferLeader", in.GetId()); err != nil {
		return nil, err
	}
	if err := s.opts.Members.Transfer(ctx, in.GetId()); err != nil {
		return nil, err
	}
	return &operatorv1.TransferLeaderResponse{}, nil
}

func (s *server) BackupCluster(_ *operatorv1.BackupClusterRequest, stream grpc.ServerStreamingServer[operatorv1.BackupClusterResponse]) error {
	if _, err := auth.Admit(stream.Context(), service+"BackupCluster", "", ""); err != nil {
		return err
	}
	if s.opts.Backup == nil {
		return fault.New(fault.Unavailable, "this member has no data to back up")
	}
	return s.opts.Backup(stream.Context(), func(b []byte) error { return stream.Send(&operatorv1.BackupClusterResponse{Data: b}) })
}

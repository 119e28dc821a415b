package etcdrpc

import (
	"context"
	"net/url"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Members lists and changes the members of the cluster; *membership.Service implements it.
type Members interface {
	List(ctx context.Context, serializable bool) ([]membership.Member, error)
	Add(ctx context.Context, q membership.AddRequest) (added membership.Member, all []membership.Member, err error)
	Promote(ctx context.Context, id uint64) ([]membership.Member, error)
	Remove(ctx context.Context, id uint64, force bool) ([]membership.Member, error)
	Update(ctx context.Context, q membership.UpdateRequest) ([]membership.Member, error)
}

// cluster implements pb.ClusterServer.
type cluster struct {
	pb.UnsafeClusterServer
	members Members
	service *kv.Service
	strict  bool
}

// MemberAdd implements pb.ClusterServer. Every new member starts as a learner. Unless the request asks for a learner,
// the member is promoted once it has caught up.
func (c *cluster) MemberAdd(ctx context.Context, r *pb.MemberAddRequest) (*pb.MemberAddResponse, error) {
	if err := c.service.MustBeAdmin(ctx); err != nil {
		return nil, err
	}
	if err := checkURLs(r.PeerURLs); err != nil {
		return nil, err
	}
	if err := c.checkStrict(ctx, checkAdd); err != nil {
		return nil, err
	}
	added, all, err := c.members.Add(ctx, membership.AddRequest{RaftAddr: r.PeerURLs[0], Learner: r.IsLearner})
	if err != nil {
		return nil, memberError(ctx, err)
	}
	return &pb.MemberAddResponse{Header: c.service.Header(), Member: memberOf(&added), Members: membersOf(all)}, nil
}

// MemberRemove implements pb.ClusterServer.
func (c *cluster) MemberRemove(ctx context.Context, r *pb.MemberRemoveRequest) (*pb.MemberRemoveResponse, error) {
	if err := c.service.MustBeAdmin(ctx); err != nil {
		return nil, err
	}
	if err := c.checkStrict(ctx, func(now *kv.Contacts) error { return checkRemove(now, r.ID) }); err != nil {
		return nil, err
	}
	// A forced removal may leave the cluster with a single voter, so it requires a credential. With TrustLoopback, a
	// caller can be without one.
	caller := auth.CallerOf(ctx)
	all, err := c.members.Remove(ctx, r.ID, caller != nil && caller.Authenticated())
	if err != nil {
		return nil, memberError(ctx, err)
	}
	return &pb.MemberRemoveResponse{Header: c.service.Header(), Members: membersOf(all)}, nil
}

// MemberUpdate implements pb.ClusterServer. It changes a member's peer URL.
func (c *cluster) MemberUpdate(ctx context.Context, r *pb.MemberUpdateRequest) (*pb.MemberUpdateResponse, error) {
	if err := c.service.MustBeAdmin(ctx); err != nil {
		return nil, err
	}
	if err := checkURLs(r.PeerURLs); err != nil {
		return nil, err
	}
	all, err := c.members.Update(ctx, membership.UpdateRequest{ID: r.ID, RaftAddr: r.PeerURLs[0]})
	if err != nil {
		return nil, memberError(ctx, err)
	}
	return &pb.MemberUpdateResponse{Header: c.service.Header(), Members: membersOf(all)}, nil
}

// MemberList implements pb.ClusterServer.
func (c *cluster) MemberList(ctx context.Context, r *pb.MemberListRequest) (*pb.MemberListResponse, error) {
	if err := c.service.MustBeAuthenticated(ctx); err != nil {
		return nil, err
	}
	all, err := c.members.List(ctx, !r.Linearizable)
	if err != nil {
		return nil, memberError(ctx, err)
	}
	return &pb.MemberListResponse{Header: c.service.Header(), Members: membersOf(all)}, nil
}

// MemberPromote implements pb.ClusterServer. It makes a learner a voter.
func (c *cluster) MemberPromote(ctx context.Context, r *pb.MemberPromoteRequest) (*pb.MemberPromoteResponse, error) {
	if err := c.service.MustBeAdmin(ctx); err != nil {
		return nil, err
	}
	all, err := c.members.Promote(ctx, r.ID)
	if err != nil {
		return nil, memberError(ctx, err)
	}
	return &pb.MemberPromoteResponse{Header: c.service.Header(), Members: membersOf(all)}, nil
}

// checkURLs checks the peer URLs of a member: exactly one valid URL, because a member has one address.
func checkURLs(all []string) error {
	if len(all) == 0 {
		return rpctypes.ErrGRPCMemberBadURLs
	}
	for _, u := range all {
		parsed, err := url.Parse(u)
		if err != nil || parsed.Scheme != "http" && parsed.Scheme != "https" || parsed.Host == "" || parsed.Path != "" {
			return rpctypes.ErrGRPCMemberBadURLs
		}
	}
	if len(all) > 1 {
		return status.Error(codes.InvalidArgument, "etcdserver: a member has exactly one peer URL in Trivet")
	}
	return nil
}

func membersOf(all []membership.Member) []*pb.Member {
	out := make([]*pb.Member, len(all))
	for i := range all {
		out[i] = memberOf(&all[i])
	}
	return out
}

// memberOf converts a member to etcd's type. A member that has not proved its identity yet gets no name; in etcd, a
// member without a name has not started yet.
func memberOf(m *membership.Member) *pb.Member {
	out := &pb.Member{ID: m.ID, PeerURLs: []string{m.RaftAddr}, IsLearner: !m.Votes()}
	if m.Proven() {
		out.Name, out.ClientURLs = m.Name, m.ClientURLs
	}
	return out
}

// memberErrors maps reasons of failures in package membership (fault.Fault) to etcd's errors.
var memberErrors = map[string]error{
	membership.ReasonExists:       rpctypes.ErrGRPCMemberExist,
	membership.ReasonAddressTaken: rpctypes.ErrGRPCPeerURLExist,
	membership.ReasonRemoved:      rpctypes.ErrGRPCMemberNotFound,
	membership.ReasonNotFound:     rpctypes.ErrGRPCMemberNotFound,
	membership.ReasonNotLearner:   rpctypes.ErrGRPCMemberNotLearner,
	membership.ReasonNotReady:     rpctypes.ErrGRPCLearnerNotReady,
	membership.ReasonQuorum:       rpctypes.ErrGRPCUnhealthy,
	membership.ReasonLastVoter:    rpctypes.ErrGRPCMemberNotEnoughStarted,
	membership.ReasonTooMany:      rpctypes.ErrGRPCTooManyLearners,
	membership.ReasonBusy:         rpctypes.ErrGRPCUnhealthy,
}

// memberError converts an error of Members to the client's error.
func memberError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return status.FromContextError(ctx.Err()).Err()
	}
	f, ok := fault.From(err)
	if !ok {
		return err
	}
	if known := memberErrors[f.Reason]; known != nil {
		return known
	}
	switch f.Kind {
	case fault.Unavailable:
		return rpctypes.ErrGRPCNoLeader
	case fault.DeadlineExceeded:
		return rpctypes.ErrGRPCTimeout
	case fault.InvalidArgument:
		return rpctypes.ErrGRPCMemberBadURLs
	}
	return status.Error(f.Kind.RPC(), "etcdserver: "+f.Message)
}

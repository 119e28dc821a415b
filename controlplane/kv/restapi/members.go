package restapi

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"

	"github.com/gorilla/mux"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Membership lists and changes the members; *membership.Service implements it. Its methods return
// fault.FailedPrecondition for a refused change and fault.DeadlineExceeded after a timeout.
type Membership interface {
	List(ctx context.Context, serializable bool) ([]membership.Member, error)
	Add(context.Context, membership.AddRequest) (membership.Member, []membership.Member, error)
	// RemoveOpen removes a member for a caller without a credential. It returns an error if fewer than three voters
	// would remain.
	RemoveOpen(ctx context.Context, id uint64) ([]membership.Member, error)
	// Transfer transfers the leadership of the given raft groups to the member with ID to.
	Transfer(ctx context.Context, to uint64, groups ...uint64) error
}

func (s *Server) memberRoutes() {
	s.route(http.MethodGet, "/api/v1/cluster/status", s.status, rest.Summary("Returns the status of the raft group according to the answering member."),
		rest.Returns(http.StatusOK, clusterStatus{}))
	added := rest.Returns(http.StatusCreated, addResponse{})
	s.auditedRoute(http.MethodPost, "/api/v1/cluster/members", pb.Cluster_MemberAdd_FullMethodName, s.addMember,
		rest.Summary("Adds a member to the cluster."), rest.Takes(memberBody{}), added)
	s.auditedRoute(http.MethodDelete, "/api/v1/cluster/members/{node_id}", pb.Cluster_MemberRemove_FullMethodName, s.removeMember,
		rest.Summary("Removes a member."), rest.Returns(http.StatusOK, removeResponse{}))
	s.auditedRoute(http.MethodPost, "/api/v1/cluster/leader/transfer", pb.Maintenance_MoveLeader_FullMethodName, s.transfer,
		rest.Summary("Moves the leader of the keys' group to another member."), rest.Takes(transferBody{}), rest.Returns(http.StatusOK, transferResponse{}))
	s.auditedRoute(http.MethodPost, "/admin/member/add", pb.Cluster_MemberAdd_FullMethodName, s.legacyAdd,
		rest.Summary("Adds a member, like POST /api/v1/cluster/members, for first-boot automation."), rest.Takes(legacyBody{}), added)
}

// auditedRoute registers a route that changes the cluster. The parameter as is the equivalent gRPC method, under which
// the audit records the call. The audit also records the caller's address, since these callers have no credential. A
// refused or failed call is recorded here. A successful call is recorded in the transaction that makes the change
// (audit.Stamp). A forwarded request is recorded by the leader.
func (s *Server) auditedRoute(method, path, as string, h handler, options ...rest.Option) {
	s.handle(method, path, func(w *rest.Response, r *http.Request) (any, error) {
		caller := &cloud.Caller{
			Method: as, Target: r.Method + " " + r.URL.EscapedPath(), Address: rest.Remote(r), RequestID: rest.RequestID(r.Context()),
		}
		data, err := s.serve(w, r.WithContext(auth.With(r.Context(), caller, auth.REST)), h)
		if f, ok := fault.From(err); s.opts.Audit != nil && err != nil {
			if !ok {
				f = fault.New(fault.Internal, "internal error")
			}
			auth.ReportFailure(s.opts.Audit, caller, auth.Method(as), f, "", "")
		}
		return data, err
	}, options...)
}

// clusterStatus is the status of the raft group according to this member. The role of a learner is Follower, as in
// raft.
type clusterStatus struct {
	// The number of the member that responds.
	NodeID uint64 `json:"node_id"`
	// The number of the cluster.
	ClusterID uint64 `json:"cluster_id"`
	// The raft term of the group of the keys. 0 if the member has not joined the group yet.
	Term uint64 `json:"term"`
	// Leader, Follower, Candidate or PreCandidate. That of a learner is Follower.
	Role string `json:"role"`
	// True if the member that responds is the leader.
	IsLeader bool `json:"is_leader"`
}

func (s *Server) status(r request) (any, error) {
	ctx, cancel := context.WithTimeout(r.Context(), keyTimeout)
	defer cancel()
	g, err := s.opts.Group.Status(ctx)
	if errors.Is(err, consensus.ErrNoGroup) { // the member has not joined the group yet
		g, err = consensus.GroupStatus{Role: "Follower"}, nil
	}
	if err != nil {
		return nil, err
	}
	return clusterStatus{
		NodeID: s.opts.Self, ClusterID: s.opts.Cluster, Term: g.Term, Role: g.Role, IsLeader: g.Leader == s.opts.Self,
	}, nil
}

// memberHost returns the host at which a member serves REST, which is the host of its raft address.
func (s *Server) memberHost(ctx context.Context, id uint64) (string, error) {
	all, err := s.opts.Members.List(ctx, true)
	if err != nil {
		return "", err
	}
	for _, m := range all {
		if m.ID != id {
			continue
		}
		if host, ok := leaderHost(m.RaftAddr); ok {
			return host, nil
		}
		return "", notLeader("member %d, the leader, has an address that cannot be used: %q", id, m.RaftAddr)
	}
	return "", notLeader("member %d, the leader, is not in the list of members", id)
}

// addTarget appends details from the request body to the description of the call that the audit records.
func (r request) addTarget(format string, args ...any) {
	if c := auth.CallerOf(r.Context()); c != nil {
		c.Target += " " + fmt.Sprintf(format, args...)
	}
}

type memberBody struct {
	// The number of the new member, 1 or more.
	NodeID uint64 `json:"node_id" api:"required"`
	// The address for other members. http:// is added if it has no scheme.
	RaftAddr string `json:"raft_addr" api:"required"`
	// The URL of the member's etcd API.
	ClientURL string `json:"client_url"`
	// Blank means node-NODE_ID.
	Name string `json:"name"`
	// True for a member that has no vote.
	IsLearner bool `json:"is_learner"`
}

func (s *Server) addMember(r request) (any, error) {
	var in memberBody
	body, free, err := s.body(r, &in)
	defer free()
	if err != nil {
		return nil, err
	}
	if in.NodeID == 0 {
		return nil, fault.Invalid("node_id", "is required: want 1 to %d", int64(math.MaxInt64))
	}
	return s.add(r, body, in)
}

type legacyBody struct {
	// node followed by a number is that number. Any other text gets a number that is derived from its SHA-256.
	ID string `json:"id" api:"required"`
	// The address for other members. http:// is added if it has no scheme.
	RaftAddr string `json:"raft_addr" api:"required"`
}

// legacyAdd adds a member for first-boot automation that uses the legacy path /admin/member/add.
func (s *Server) legacyAdd(r request) (any, error) {
	var in legacyBody
	body, free, err := s.body(r, &in)
	defer free()
	if err != nil {
		return nil, err
	}
	id, err := legacyID(in.ID)
	if err != nil {
		return nil, err
	}
	return s.add(r, body, memberBody{NodeID: id, RaftAddr: in.RaftAddr, Name: in.ID})
}

// legacyID converts an ID of the legacy path, which is a text, to a numeric ID. For node<number>, the numeric ID is
// that number. For any other text it is the last 53 bits of the SHA-256 of the text.
func legacyID(text string) (uint64, error) {
	if strings.TrimSpace(text) == "" {
		return 0, fault.Invalid("id", "is required")
	}
	if digits, ok := strings.CutPrefix(text, "node"); ok && digits != "" && strings.Trim(digits, "0123456789") == "" {
		switch n, err := strconv.ParseUint(digits, 10, 63); {
		case err == nil && n == 0:
			return 0, fault.Invalid("id", "is node 0: members are numbered from 1")
		case err == nil:
			return n, nil
		}
	}
	sum := sha256.Sum256([]byte(text))
	return max(binary.BigEndian.Uint64(sum[len(sum)-8:])&membership.MaxID, 1), nil
}

type addResponse struct {
	// The number of the new member.
	NodeID uint64 `json:"node_id"`
	// The address for other members.
	RaftAddr string `json:"raft_addr"`
	// How many members the cluster has now.
	Members int `json:"members"`
	// Always true.
	Success bool `json:"success"`
}

func (s *Server) add(r request, body []byte, in memberBody) (any, error) {
	if strings.TrimSpace(in.RaftAddr) == "" {
		return nil, fault.Invalid("raft_addr", "is required")
	}
	q := membership.AddRequest{ID: in.NodeID, Name: in.Name, RaftAddr: in.RaftAddr, Learner: in.IsLearner, Open: true}
	if in.ClientURL != "" {
		q.ClientURLs = []string{in.ClientURL}
	}
	r.addTarget("node_id=%d raft_addr=%s", q.ID, q.RaftAddr)
	return s.change(r, body, func(ctx context.Context, w *rest.Response) (any, error) {
		added, all, err := s.opts.Members.Add(ctx, q)
		if err != nil {
			return nil, err
		}
		w.Status = http.StatusCreated
		return addResponse{NodeID: added.ID, RaftAddr: added.RaftAddr, Members: len(all), Success: true}, nil
	})
}

type removeResponse struct {
	// The number of the removed member.
	NodeID uint64 `json:"node_id"`
	// How many members the cluster has now.
	Members int `json:"members"`
	// Always true.
	Success bool `json:"success"`
}

func (s *Server) removeMember(r request) (any, error) {
	id, err := strconv.ParseUint(mux.Vars(r.Request)["node_id"], 10, 64)
	if err != nil || id == 0 {
		return nil, fault.Invalid("node_id", "want a whole number from 1")
	}
	return s.change(r, nil, func(ctx context.Context, _ *rest.Response) (any, error) {
		all, err := s.opts.Members.RemoveOpen(ctx, id)
		if err != nil {
			return nil, err
		}
		return removeResponse{id, len(all), true}, nil
	})
}

type transferBody struct {
	// The number of the member that becomes the leader, 1 or more.
	TargetID uint64 `json:"target_id" api:"required"`
}

type transferResponse struct {
	// The number of the new leader.
	Leader uint64 `json:"leader"`
	// Always true.
	Success bool `json:"success"`
}

func (s *Server) transfer(r request) (any, error) {
	var in transferBody
	body, free, err := s.body(r, &in)
	defer free()
	if err != nil {
		return nil, err
	}
	if in.TargetID == 0 {
		return nil, fault.Invalid("target_id", "want the id of a member, from 1")
	}
	r.addTarget("target_id=%d", in.TargetID)
	return s.change(r, body, func(ctx context.Context, _ *rest.Response) (any, error) {
		if err := s.opts.Members.Transfer(ctx, in.TargetID, s.opts.GroupID); err != nil {
			return nil, err
		}
		if s.opts.Audit != nil {
			s.opts.Audit.Done(auth.CallerOf(ctx)) // a transfer has no transaction that could record it in the audit
		}
		return transferResponse{in.TargetID, true}, nil
	})
}

// change makes a change of the members or of the leader. If this member is the leader, change calls the function do,
// which makes the change. Otherwise it forwards the request to the leader. It returns fault.DeadlineExceeded if the
// change takes longer than memberTimeout.
func (s *Server) change(r request, body []byte, do func(context.Context, *rest.Response) (any, error)) (any, error) {
	to, err := s.destination(r, false)
	if err != nil {
		return nil, err
	}
	if !to.local {
		return s.forwardTo(r, to, body, memberTimeout, false)
	}
	ctx, cancel := context.WithTimeout(r.Context(), memberTimeout)
	defer cancel()
	data, err := do(ctx, r.w)
	if _, ours := fault.From(err); err != nil && !ours && ctx.Err() != nil {
		err = fault.New(fault.DeadlineExceeded, "the change was not carried out in time; it may still be carried out").MayRetry().Because(err)
	}
	return data, err
}

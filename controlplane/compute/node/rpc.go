package node

import (
	"context"
	"maps"
	"strings"
	"time"

	"google.golang.org/grpc"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Register registers NodeService for API callers, on the server of port 50051.
func (s *Service) Register(g grpc.ServiceRegistrar) { vmv1.RegisterNodeServiceServer(g, &server{s: s}) }

type server struct {
	vmv1.UnsafeNodeServiceServer
	s *Service
}

const service = "/vmcontroller.v1.NodeService/"

func (r *server) ListNodes(ctx context.Context, in *vmv1.ListNodesRequest) (*vmv1.ListNodesResponse, error) {
	if _, err := auth.Admit(ctx, service+"ListNodes", "", ""); err != nil {
		return nil, err
	}
	nodes, next, err := r.s.list(ctx, in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	shown, err := r.s.shown(ctx, nodes)
	if err != nil {
		return nil, err
	}
	return &vmv1.ListNodesResponse{Nodes: shown, NextPageToken: next}, nil
}

func (r *server) GetNode(ctx context.Context, in *vmv1.GetNodeRequest) (*vmv1.Node, error) {
	if _, err := auth.Admit(ctx, service+"GetNode", "", ""); err != nil {
		return nil, err
	}
	if err := cloud.CheckUUID("node_id", in.GetNodeId()); err != nil {
		return nil, err
	}
	n, err := r.s.get(ctx, cloud.NodeID(in.GetNodeId()))
	if err != nil {
		return nil, err
	}
	return one(r.s.shown(ctx, []*cloud.Node{n}))
}

func one(nodes []*vmv1.Node, err error) (*vmv1.Node, error) {
	if err != nil {
		return nil, err
	}
	return nodes[0], nil
}

func (r *server) CordonNode(ctx context.Context, in *vmv1.CordonNodeRequest) (*vmv1.Node, error) {
	return r.cordon(ctx, service+"CordonNode", in.GetNodeId(), true)
}

func (r *server) UncordonNode(ctx context.Context, in *vmv1.UncordonNodeRequest) (*vmv1.Node, error) {
	return r.cordon(ctx, service+"UncordonNode", in.GetNodeId(), false)
}

func (r *server) cordon(ctx context.Context, method auth.Method, id string, cordon bool) (*vmv1.Node, error) {
	if _, err := auth.Admit(ctx, method, "", ""); err != nil {
		return nil, err
	}
	n, err := r.s.Cordon(ctx, cloud.NodeID(id), cordon)
	if err != nil {
		return nil, err
	}
	return one(r.s.shown(ctx, []*cloud.Node{&n}))
}

func (r *server) DrainNode(ctx context.Context, in *vmv1.DrainNodeRequest) (*vmv1.Node, error) {
	if _, err := auth.Admit(ctx, service+"DrainNode", "", ""); err != nil {
		return nil, err
	}
	n, err := r.s.Drain(ctx, cloud.NodeID(in.GetNodeId()), in.GetForce(), in.GetTimeoutSeconds())
	if err != nil {
		return nil, err
	}
	return one(r.s.shown(ctx, []*cloud.Node{&n}))
}

func (r *server) HeartbeatNode(context.Context, *vmv1.HeartbeatNodeRequest) (*vmv1.Node, error) {
	return nil, fault.New(fault.PermissionDenied, "HeartbeatNode is for agents, on their own port, with a host's certificate")
}

// shown converts host records to what the caller may see, with each host's current state. A caller with system:admin
// sees all fields. Others see the ID, the name, the hypervisors, the labels beginning with trivet/, and the state.
func (s *Service) shown(ctx context.Context, nodes []*cloud.Node) ([]*vmv1.Node, error) {
	ids := make([]cloud.NodeID, len(nodes))
	for i, n := range nodes {
		ids[i] = n.ID
	}
	// Only the leader has the heartbeat times, so this call fails while there is no leader.
	alive, err := lastHeardCommand.Call(ctx, s.opts.Commands, ids)
	if err != nil {
		return nil, err
	}
	admin := auth.CallerOf(ctx).IsCloudAdmin()
	out := make([]*vmv1.Node, len(nodes))
	for i, n := range nodes {
		seen, last := *n, alive.Seen[n.ID]
		state := n.State(alive.Now, last)
		if !admin {
			seen = cloud.Node{ID: n.ID, Name: n.Name, Hypervisors: n.Hypervisors, Labels: maps.Clone(n.Labels)}
			maps.DeleteFunc(seen.Labels, func(k, _ string) bool { return !strings.HasPrefix(k, "trivet/") })
			last = 0
		} else if err := s.addClasses(&seen); err != nil {
			return nil, err
		}
		out[i] = convert.Node(&seen, state, last)
		if !admin {
			// Absent messages, because zeros would say that the host has no room.
			out[i].Capacity, out[i].Allocatable, out[i].Allocated = nil, nil, nil
		}
	}
	return out, nil
}

// NewToken creates a join token and returns its text and its expiry time. A nonempty name restricts the token to the
// host of that name. ttl 0 means one hour; the maximum is 30 days. The caller must already be authorized.
func (s *Service) NewToken(ctx context.Context, name string, ttl time.Duration) (token string, expires cloud.Time, err error) {
	switch {
	case ttl == 0:
		ttl = tokenTTL
	case ttl < 0 || ttl > maxTokenTTL:
		return "", 0, fault.Invalid("ttl_seconds", "at most %d", int(maxTokenTTL.Seconds()))
	}
	if name != "" {
		if err := checkHostName(name); err != nil {
			return "", 0, err
		}
	}
	made, err := newTokenCommand.Call(ctx, s.opts.Commands, tokenRequest{name, ttl})
	return made.Token, made.Expires, err
}

package node

import (
	"cmp"
	"context"
	"errors"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// NetworkController sends hosts the state of the VPCs that they need. Package network implements it.
type NetworkController interface {
	// Sync serves a SyncNetworks stream of a host, whose first request is first. It returns when the stream's context
	// ends or when the host opens another stream. The context ends with the term, in which this member leads. Sync
	// calls charge with the number of records that an acknowledgment has changed; charge waits if they are too many.
	Sync(node cloud.NodeID, term uint64, first *agentv1.SyncNetworksRequest, stream agentv1.AgentService_SyncNetworksServer,
		charge func(context.Context, int) error) error
}

// AttachNetworks sets the source of the state of VPCs. Call it before the service receives calls.
func (s *Service) AttachNetworks(n NetworkController) { s.networks = n }

// SyncNetworks admits the host and passes the stream to the NetworkController.
func (a *agents) SyncNetworks(stream agentv1.AgentService_SyncNetworksServer) error {
	s := a.s
	id, leave, err := s.admit(stream.Context())
	if err != nil {
		return err
	}
	defer leave()
	ctx, cancel, err := s.untilExpiry(stream.Context())
	if err != nil {
		return err
	}
	defer cancel()
	if err := s.throttle(ctx, s.budgetOf(id).watches, 1); err != nil {
		return err
	}
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	if err := checkProtocol(first.GetProtocol()); err != nil {
		return err
	}
	if s.networks == nil {
		return fault.New(fault.Unimplemented, "this member does not serve networks")
	}
	leading, term := s.opts.Leadership.Leader()
	if leading != s.opts.Self {
		return s.redirect(leading)
	}
	ctx, stop := leader.InTerm(ctx, s.opts.Leadership, s.opts.Self, term)
	defer stop()
	b := s.budgetOf(id)
	charge := func(ctx context.Context, changed int) error { return s.throttle(ctx, b.changes, changed) }
	limited := &networkStream{AgentService_SyncNetworksServer: stream, ctx: ctx, s: s, budget: b}
	err = s.networks.Sync(id, term, first, limited, charge)
	switch {
	case ctx.Err() == nil:
		// The NetworkController may have noticed the end of the term first.
		return cmp.Or(s.checkLeader(), err)
	case errors.Is(context.Cause(ctx), leader.ErrTermOver):
		return s.termOver()
	}
	return context.Cause(ctx)
}

// Limits of the requests of SyncNetworks, besides those of budget.go.
const (
	// maxFailures is the maximum number of failures in a request.
	maxFailures = 1000
	// maxFailureText is the maximum size of the text of a failure in bytes.
	maxFailureText = 1024
	// maxBackendHealth is the maximum number of reports about backends in a request.
	maxBackendHealth = 1000
)

// networkStream is a SyncNetworks stream with limits on the requests of the host. Its context ends with the term of the
// leader and when the certificate of the host expires.
type networkStream struct {
	agentv1.AgentService_SyncNetworksServer
	ctx    context.Context
	s      *Service
	budget *budget
}

// Context returns the context of the stream.
func (n *networkStream) Context() context.Context { return n.ctx }

// Recv returns the next request. It waits if the host sends more requests than the budget permits, and returns an error
// if the request exceeds a limit, or the host has been evicted or banned.
func (n *networkStream) Recv() (*agentv1.SyncNetworksRequest, error) {
	r, err := n.AgentService_SyncNetworksServer.Recv()
	if err != nil {
		return nil, err
	}
	if len(r.GetFailures()) > maxFailures {
		return nil, fault.Invalid("failures", "at most %d, got %d", maxFailures, len(r.GetFailures()))
	}
	for _, f := range r.GetFailures() {
		if err := cloud.CheckUUID("failures.vpc_id", f.GetVpcId()); err != nil {
			return nil, err
		}
		if len(f.GetError()) > maxFailureText {
			return nil, fault.Invalid("failures.error", "at most %d bytes, got %d", maxFailureText, len(f.GetError()))
		}
	}
	if err := checkBackendHealth(r.GetBackendHealth()); err != nil {
		return nil, err
	}
	if err := n.s.throttle(n.ctx, n.budget.observations, messageCost+len(r.GetFailures())+len(r.GetBackendHealth())); err != nil {
		return nil, err
	}
	_, err = n.s.caller(n.AgentService_SyncNetworksServer.Context())
	return r, err
}

// checkBackendHealth returns an InvalidArgument fault if the reports about backends exceed a limit or do not identify a
// backend.
func checkBackendHealth(all []*agentv1.BackendHealth) error {
	if len(all) > maxBackendHealth {
		return fault.Invalid("backend_health", "at most %d, got %d", maxBackendHealth, len(all))
	}
	for _, b := range all {
		if err := cloud.CheckUUID("backend_health.vpc_id", b.GetVpcId()); err != nil {
			return err
		}
		if err := cloud.CheckUUID("backend_health.service_ip_id", b.GetServiceIpId()); err != nil {
			return err
		}
		if (b.GetPortId() == "") == (b.GetAddress() == "") {
			return fault.Invalid("backend_health", "each needs either port_id or address")
		}
		if b.GetPortId() == "" {
			if _, err := cloud.ParseAddr("backend_health.address", b.GetAddress()); err != nil {
				return err
			}
		} else if err := cloud.CheckUUID("backend_health.port_id", b.GetPortId()); err != nil {
			return err
		}
	}
	return nil
}

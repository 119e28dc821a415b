package network

import (
	"context"
	"maps"
	"slices"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// maxAcknowledged is the maximum number of ports that one transaction changes for an acknowledgment.
const maxAcknowledged = 256

// receive processes the acknowledgments of a host, and its reports about backends, until the stream ends.
func (f *Feed) receive(
	ctx context.Context, s *feedSession, receive func() (*agentv1.SyncNetworksRequest, error),
	charge func(context.Context, int) error,
) error {
	for {
		r, err := receive()
		if err != nil {
			return err
		}
		all, err := f.acknowledged(s, r)
		if err != nil {
			return err
		}
		for part := range slices.Chunk(all, maxAcknowledged) {
			changed, err := f.setStatus(ctx, s.node, part)
			if err != nil {
				return err
			}
			if err := charge(ctx, changed); err != nil {
				return err
			}
		}
		if err := f.recordHealth(ctx, s, r.GetBackendHealth(), charge); err != nil {
			return err
		}
	}
}

// bindingStatus is the status that an acknowledgment gives a port, a NAT gateway or a floating IP. It applies only to
// the binding with that generation.
type bindingStatus struct {
	key        recordKey
	generation uint64
	status     cloud.NetworkStatus
	reason     string
	// withdrawn is true if the host has acknowledged that it no longer has the gateway.
	withdrawn bool
}

// acknowledged returns the ports, NAT gateways and floating IPs of the host whose status an acknowledgment changes. It
// returns InvalidArgument if the host acknowledges a revision that the session has not sent.
func (f *Feed) acknowledged(s *feedSession, r *agentv1.SyncNetworksRequest) (out []bindingStatus, err error) {
	failures := map[cloud.VPCID]string{}
	for _, e := range r.GetFailures() {
		failures[cloud.VPCID(e.GetVpcId())] = e.GetError()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.index == nil || f.sessions[s.node] != s {
		return nil, nil
	}
	if r.GetAppliedRevision() > s.sent {
		return nil, fault.Invalid("applied_revision", "%d was not sent yet: the last was %d", r.GetAppliedRevision(), s.sent)
	}
	if r.GetAppliedRevision() == s.sent && !s.sentAt.IsZero() {
		f.metrics.lag.Observe(time.Since(s.sentAt).Seconds())
		s.sentAt = time.Time{}
	}
	s.acked = max(s.acked, r.GetAppliedRevision())
	pending := f.index.pending[s.node]
	for _, key := range slices.SortedFunc(maps.Keys(pending), compareKeys) {
		p := pending[key]
		if p.revision > r.GetAppliedRevision() && !mutant.On(mutant.ActiveWithoutAck) {
			continue
		}
		status := bindingStatus{key: key, generation: p.generation, status: cloud.NetworkActive, withdrawn: p.withdrawn}
		if reason, failed := failures[p.vpc]; failed {
			status.status, status.reason = cloud.NetworkError, reason
		}
		if p.withdrawn && status.status == cloud.NetworkError {
			continue // the host may still have the gateway
		}
		n := f.index.networks[s.node]
		lacks := p.external != "" && (n == nil || !slices.Contains(n.External, p.external))
		if lacks && status.status == cloud.NetworkActive {
			status.status, status.reason = cloud.NetworkPending, lacksExternal(s.node, p.external)
		}
		if status.status != p.status || status.reason != p.reason {
			out = append(out, status)
		}
	}
	return out, nil
}

// setStatus changes the status of ports, NAT gateways and floating IPs in one transaction, and returns how many it has
// changed. It skips a record whose binding has changed since the host received the acknowledged revision.
func (f *Feed) setStatus(ctx context.Context, node cloud.NodeID, all []bindingStatus) (changed int, err error) {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	_, err = f.opts.Store.Update(ctx, func(tx *store.Tx) error {
		changed = 0
		for _, a := range all {
			f.reads.Add(1)
			if a.key.kind != feedPort {
				set, err := setPlacedStatus(tx, node, a)
				if err != nil {
					return err
				}
				if set {
					changed++
				}
				continue
			}
			p, err := ports.Get(tx, string(a.key.project), a.key.id)
			if err != nil {
				return err
			}
			if p == nil || p.Node != node || p.BindingGeneration != a.generation ||
				p.Status != cloud.NetworkPending && p.Status != cloud.NetworkError {
				continue
			}
			if p.Status == a.status && p.StatusReason == a.reason {
				continue
			}
			p.Status, p.StatusReason, p.UpdatedAt = a.status, a.reason, tx.Now()
			ports.Put(tx, p, string(p.Project), string(p.ID))
			changed++
		}
		return nil
	})
	return changed, err
}

package network

import (
	"context"
	"maps"
	"slices"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// maxReported is the maximum number of service IPs whose backends one transaction changes.
const maxReported = 64

// recordHealth stores a host's reports about backends of service IPs. It calls charge with the number of backends that
// changed.
func (f *Feed) recordHealth(
	ctx context.Context, s *feedSession, all []*agentv1.BackendHealth, charge func(context.Context, int) error,
) error {
	reports, err := f.healthReports(s, all)
	if err != nil {
		return err
	}
	keys := slices.SortedFunc(maps.Keys(reports), compareKeys)
	for part := range slices.Chunk(keys, maxReported) {
		changed, err := f.setHealth(ctx, s.node, part, reports)
		if err != nil {
			return err
		}
		if err := charge(ctx, changed); err != nil {
			return err
		}
	}
	return nil
}

// healthReports returns the reports by service IP. It leaves out reports about VPCs of which the host has no port: a
// host that has a VPC only because of a peering or a NAT gateway reports nothing about it. It returns no report after
// another session of the host has begun.
func (f *Feed) healthReports(
	s *feedSession, all []*agentv1.BackendHealth,
) (map[recordKey][]cloud.BackendHealth, error) {
	out := map[recordKey][]cloud.BackendHealth{}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.index == nil || f.sessions[s.node] != s {
		return nil, nil
	}
	hasPort := map[cloud.VPCID]bool{}
	if len(all) > 0 {
		hasPort = f.index.vpcsOfPorts(s.node)
	}
	for _, in := range all {
		r := cloud.BackendHealth{
			VPC: cloud.VPCID(in.GetVpcId()), Service: cloud.ServiceIPID(in.GetServiceIpId()),
			Port: cloud.PortID(in.GetPortId()), Healthy: in.GetHealthy(),
		}
		var err error
		if r.Address, err = addressOf("backend_health.address", in.GetAddress()); err != nil {
			return nil, err
		}
		if hasPort[r.VPC] {
			key := recordKey{feedService, f.index.vpcs[r.VPC].project, string(r.Service)}
			out[key] = append(out[key], r)
		}
	}
	return out, nil
}

// setHealth stores the reports about the service IPs in keys, in one transaction. It returns how many backends have
// changed.
func (f *Feed) setHealth(
	ctx context.Context, node cloud.NodeID, keys []recordKey, reports map[recordKey][]cloud.BackendHealth,
) (changed int, err error) {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	_, err = f.opts.Store.Update(ctx, func(tx *store.Tx) error {
		changed = 0
		for _, key := range keys {
			f.reads.Add(1)
			s, err := serviceIPs.Get(tx, string(key.project), key.id)
			if err != nil {
				return err
			}
			if s == nil || s.Health == nil || s.VPC != reports[key][0].VPC {
				continue
			}
			n, err := setHealth(tx, node, s, reports[key])
			if err != nil {
				return err
			}
			if n == 0 {
				continue
			}
			changed += n
			if len(s.Selector) == 0 {
				setServiceStatus(s)
			}
			s.UpdatedAt = tx.Now()
			serviceIPs.Put(tx, s, string(s.Project), string(s.ID))
		}
		return nil
	})
	return changed, err
}

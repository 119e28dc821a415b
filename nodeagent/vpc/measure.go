package vpc

import (
	"context"
	"maps"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// PortCounters returns what the ports on this host have received and sent since their devices were made. It reads them
// from the kernel. Ports that cannot be read, and those without a device, are missing in the result.
func (n *Networks) PortCounters(ctx context.Context) map[cloud.PortID]cloud.PortCounters {
	out := map[cloud.PortID]cloud.PortCounters{}
	for _, id := range n.withPorts() {
		if ctx.Err() != nil {
			break
		}
		// A VPC that is being removed returns an error, which needs no attention. Other errors also occur when the VPC
		// is applied, and are logged there.
		if counters, err := n.plane.portCounters(ctx, id); err == nil {
			maps.Copy(out, counters)
		}
	}
	return out
}

// withPorts returns the VPCs that have ports on this host.
func (n *Networks) withPorts() (ids []cloud.VPCID) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	for id, w := range n.workers {
		if len(w.ports) > 0 {
			ids = append(ids, id)
		}
	}
	return ids
}

// measure reads the counters of the packet filter for Status, at most once in Options.resync: reading them runs
// programs. The worker calls it after it applied the VPC, so that the namespace is not removed meanwhile.
func (n *Networks) measure(w *worker) {
	now := time.Now()
	if !w.measured.IsZero() && now.Sub(w.measured) < n.o.resync {
		return
	}
	select {
	case n.slots <- struct{}{}:
		defer func() { <-n.slots }()
	case <-n.ctx.Done():
		return
	}
	w.measured = now
	counters, err := n.plane.counters(n.ctx, w.id)
	if err != nil {
		if n.ctx.Err() == nil {
			n.o.Log.Warn("cannot read the counters of a VPC's packet filter", "vpc", w.id, "err", err)
		}
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	w.counters = &counters
}

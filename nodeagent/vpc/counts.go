package vpc

import (
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/firewall"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Counts are totals of all VPCs since Networks was made.
type Counts struct {
	Applied   uint64        // times that a VPC was applied
	Failures  uint64        // times that a VPC could not be applied
	Repairs   uint64        // times that a change of the kernel's state by somebody else was repaired
	Writes    uint64        // changes of the kernel's state
	ApplyTime time.Duration // of all VPCs that were applied
}

// VPCStatus describes a VPC on this host.
type VPCStatus struct {
	ID           cloud.VPCID
	Ports, Rules int           // of the state in force
	ApplyTime    time.Duration // of the last time that the VPC was applied
	Failed       bool
	// Counters are those of the packet filter. They are up to a minute old, and nil until they have been read once.
	Counters *firewall.Counters
}

// Counts returns the totals.
func (n *Networks) Counts() Counts {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.counts
}

// Status returns the VPCs on this host, in no order.
func (n *Networks) Status() []VPCStatus {
	n.mu.RLock()
	defer n.mu.RUnlock()
	var out []VPCStatus
	for id, w := range n.workers {
		out = append(out, VPCStatus{
			ID: id, Ports: len(w.ports), Rules: w.rules, ApplyTime: w.took, Failed: w.err != nil, Counters: w.counters,
		})
	}
	return out
}

package vpc

import (
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/firewall"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Counts are totals of all VPCs since Networks was made.
type Counts struct {
	// Applied counts the successful applications of a VPC, and Failures counts the failed ones.
	Applied, Failures uint64
	// Repairs counts the applications that undid a change that another program had made.
	Repairs uint64
	// Writes counts the changes of the kernel's state.
	Writes uint64
	// ApplyTime is the sum of the durations of all applications.
	ApplyTime time.Duration
}

// VPCStatus describes a VPC on this host.
type VPCStatus struct {
	ID cloud.VPCID
	// Ports and Rules are the numbers of ports on this host and of rules in the state in force.
	Ports, Rules int
	// ApplyTime is the duration of the last application.
	ApplyTime time.Duration
	// Failed is true if the last application failed.
	Failed bool
	// Counters has the counters of the VPC's packet filter. It is nil until they have been read for the first time, and
	// up to a minute old afterwards.
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

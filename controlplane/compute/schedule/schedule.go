// Package schedule chooses hosts for VMs. Its functions are pure: they read no clock, no record and no random source,
// so equal arguments give equal results. The main type is Index, which holds the hosts. Index.Place chooses a host for
// one VM.
//
// A host is considered if no entry of the table filters excludes it. Of the remaining hosts Place chooses the first in
// this order (type rank):
//
//  1. the fewest VMs of the VM's soft anti-affinity group;
//  2. the fewest VMs of the VM's spread group on the hosts with the same value of the spread label, and hosts without
//     that label last;
//  3. hosts with a VM of the VM's soft affinity group;
//  4. the highest level: how much of the host's scarcest resource stays free, in twentieths;
//  5. the smallest distance on a ring from the hash of the VM's ID to the hash of the host's ID.
//
// Decisions:
//   - Level is in twentieths, and not exact, so that many hosts are equally good. The ring then distributes VMs that
//     are created at the same time over these hosts, which avoids conflicts of their transactions.
//   - Level depends only on a host's class (hosts of about equal size) and on its cell (the free twentieths of each
//     resource). So Place compares cells instead of hosts: 10,000 hosts usually have a few hundred cells.
//   - In a cell, hosts are sorted by their position on the ring. Place finds the first host by binary search, and skips
//     hosts that a filter excludes. A search is linear in the number of hosts only if nearly all hosts are excluded for
//     a reason that classes, cells and labels do not show.
//   - If no host fits, Place examines every host, and returns the reason for each.
package schedule

import (
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Candidate is a host with its state (such as READY) according to the leader.
type Candidate struct {
	Node  cloud.Node
	State cloud.NodeState
}

// Request describes what a VM needs of a host.
type Request struct {
	VM cloud.VMID
	// Now is the time at which the states of hosts are computed, in the unit of Index.Put's lastSeen.
	Now  cloud.Time
	Need cloud.Capacity
	// Architecture is the CPU architecture of the VM's images; unspecified allows any host.
	Architecture cloud.Architecture
	// CPUModel must be among the CPU models that the host reports; empty allows any host.
	CPUModel string
	// Features are the features of virtual machines that the host must serve, such as cloud.FeatureUEFI.
	Features []string
	// Selector holds the labels, with their values, that the host must have.
	Selector map[string]string
	// On is the only host that may be chosen. It is empty if any host may be chosen.
	On cloud.NodeID
	// Skip holds hosts that must not be chosen, with the reasons.
	Skip map[cloud.NodeID]string
	// Check returns the reason why a host cannot have the VM, or "". Place calls Check for those hosts that it examines,
	// and does not change the index meanwhile. Check may be nil. It must not call methods of the index.
	Check func(*cloud.Node) string
	Groups
}

// Groups holds, for each kind of group that the VM belongs to, how many other VMs of the group each host has. A map is
// nil if the VM is in no group of the kind.
type Groups struct {
	// Affinity: if the group has members, the VM must be on a host with one.
	Affinity map[cloud.NodeID]int
	// AntiAffinity: the VM must not be on a host with a member.
	AntiAffinity map[cloud.NodeID]int
	// AffinitySoft: hosts with a member are preferred. AntiAffinitySoft: hosts with the fewest members are preferred.
	AffinitySoft, AntiAffinitySoft map[cloud.NodeID]int
	// SpreadLabel is a label of hosts, such as a rack. The VM is placed on a host whose value of the label has the fewest
	// VMs of the VM's spread group, which are counted in Spread. SpreadLabel is empty if the VM has no such preference.
	SpreadLabel string
	Spread      map[cloud.NodeID]int
}

// Decision is the result of Place.
type Decision struct {
	// Node is the chosen host. It is empty if no host fits.
	Node cloud.NodeID
	// Refused has the reason for every host, sorted by host ID, if no host fits. Otherwise it is nil.
	Refused []Refusal
}

// Refusal is the reason why a host was not chosen.
type Refusal struct {
	Node cloud.NodeID
	Name string
	// Reason is the predicate of a sentence whose subject is the host.
	Reason string
	// Group is Reason without the numbers that differ between hosts. Summarize counts refusals by Group.
	Group string
	// Kind is the rule that excluded the host. It has few values, so that it can be the label of a metric.
	Kind Kind
}

// Kind names a placement rule that excludes hosts. The values are in the label reason of
// trivet_placement_refused_hosts_total.
type Kind string

// The values of Kind. If a host has too little of a resource, the value is the name of the resource.
const (
	KindState        Kind = "state"
	KindHypervisor   Kind = "hypervisor"
	KindArchitecture Kind = "architecture"
	KindCPUModel     Kind = "cpu_model"
	KindFeature      Kind = "feature"
	KindFull         Kind = "full_meanwhile" // another placement used the capacity meanwhile, or the host was deleted
	KindCheck        Kind = "network_or_volume"
	KindOtherHost    Kind = "not_the_required_host" // the VM must be on another host
	KindLabels       Kind = "labels"
	KindAntiAffinity Kind = "anti_affinity"
	KindAffinity     Kind = "affinity"
	KindVCPUs        Kind = "vcpus"
	KindMemory       Kind = "memory"
	KindHugepages    Kind = "hugepages"
	KindDedicated    Kind = "dedicated_cpus"
	KindStorage      Kind = "storage"
)

// Place chooses a host for the VM that r describes.
func (ix *Index) Place(r *Request) Decision {
	q := ix.newQuery(r)
	if h := q.search(); h != nil {
		return Decision{Node: h.node.ID}
	}
	return Decision{Refused: ix.explain(q)}
}

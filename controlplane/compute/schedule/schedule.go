// Package schedule chooses a host for a VM. Filters exclude hosts that cannot run the VM, and a score ranks the others.
// For each excluded host the result has the reason of the first filter that excluded it. Place is a pure function:
// equal arguments give the same host and the same reasons.
package schedule

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Candidate is a host with its state (such as READY) according to the leader.
type Candidate struct {
	Node  cloud.Node
	State cloud.NodeState
	// NoNetwork is why the host cannot have the VM's network interfaces. It is empty if the host can have them, or the
	// VM has none.
	NoNetwork string
	// NoVolumes says why the host cannot have the VM's volumes. It is empty if the host can have them or the VM has no
	// volumes.
	NoVolumes string
}

// Request describes what a VM needs of a host.
type Request struct {
	VM   cloud.VMID
	Need cloud.Capacity
	// Architecture is the CPU architecture of the VM's images; unspecified allows any host.
	Architecture cloud.Architecture
	// CPUModel must be among the CPU models that the host reports; empty allows any host.
	CPUModel string
	// Selector holds the labels, with their values, that the host must have.
	Selector map[string]string
	// Avoid holds the hosts that must not be chosen, because a VM of the same anti-affinity group is placed on them.
	Avoid map[cloud.NodeID]bool
}

// filters run in this order. The first non-empty result excludes the host and is the reason that Place returns.
var filters = []func(*Candidate, *Request) string{
	func(c *Candidate, _ *Request) string {
		if c.State != cloud.NodeReady {
			return "is " + c.State.String()
		}
		return ""
	},
	func(c *Candidate, _ *Request) string {
		if !slices.Contains(c.Node.Hypervisors, cloud.KVM) {
			return "does not run KVM"
		}
		return ""
	},
	func(c *Candidate, r *Request) string {
		if r.Architecture != cloud.ArchUnspecified && c.Node.Architecture != r.Architecture {
			return "is of another architecture"
		}
		return ""
	},
	func(c *Candidate, r *Request) string {
		if r.CPUModel != "" && !slices.Contains(c.Node.CPUModels, r.CPUModel) {
			return "does not offer the CPU model " + r.CPUModel
		}
		return ""
	},
	func(c *Candidate, _ *Request) string {
		if c.NoNetwork != "" {
			return "has no network: " + c.NoNetwork
		}
		return ""
	},
	func(c *Candidate, _ *Request) string { return c.NoVolumes },
	func(c *Candidate, r *Request) string {
		for k, v := range r.Selector {
			if c.Node.Labels[k] != v {
				return "does not have the labels of the node selector"
			}
		}
		return ""
	},
	func(c *Candidate, r *Request) string {
		if r.Avoid[c.Node.ID] {
			return "runs a member of the same anti-affinity group"
		}
		return ""
	},
	func(c *Candidate, r *Request) string { return Shortage(&c.Node, r.Need) },
}

// Shortage returns a text that names the first resource of which the host n has less free than need requires. It
// returns "" if the host has enough of each resource.
func Shortage(n *cloud.Node, need cloud.Capacity) string {
	free := n.Allocatable.Minus(n.Allocated)
	for _, r := range []struct {
		name       string
		want, have uint64
	}{
		{"vCPUs", uint64(need.VCPUs), uint64(free.VCPUs)},
		{"MiB of memory", need.MemoryMiB, free.MemoryMiB},
		{"GiB of storage", need.StorageGiB, free.StorageGiB},
	} {
		if r.want > r.have {
			return fmt.Sprintf("has %d %s free, %d needed", r.have, r.name, r.want)
		}
	}
	return ""
}

// Place chooses a host of fleet for the VM that r describes. The map refused holds the reason for each excluded host,
// by host ID. If all hosts are excluded, ok is false.
func Place(fleet []Candidate, r *Request) (node cloud.NodeID, refused map[cloud.NodeID]string, ok bool) {
	best := -1.0
	var chosen []cloud.NodeID
	scores := make(map[cloud.NodeID]float64, len(fleet))
	for i := range fleet {
		c := &fleet[i]
		if why := refusal(c, r); why != "" {
			if refused == nil {
				refused = map[cloud.NodeID]string{}
			}
			refused[c.Node.ID] = why
			continue
		}
		s := score(c, r)
		scores[c.Node.ID] = s
		best = max(best, s)
	}
	for id, s := range scores {
		if s >= best-scoreTolerance {
			chosen = append(chosen, id)
		}
	}
	if len(chosen) == 0 {
		return "", refused, false
	}
	return slices.MinFunc(chosen, func(a, b cloud.NodeID) int {
		return cmp.Or(cmp.Compare(tieBreaker(r.VM, a), tieBreaker(r.VM, b)), cmp.Compare(a, b))
	}), refused, true
}

func refusal(c *Candidate, r *Request) string {
	for _, f := range filters {
		if why := f(c, r); why != "" {
			return why
		}
	}
	return ""
}

// scoreTolerance is how much lower than the best score a host's score may be so that the host still counts as equally
// good. tieBreaker chooses one of these hosts. This spreads VMs that are created at the same time.
const scoreTolerance = 0.05

// score returns how much of the host's scarcest resource stays free after placement, as a fraction. A higher score is
// better.
func score(c *Candidate, r *Request) float64 {
	after := c.Node.Allocated.Plus(r.Need)
	left := 1.0
	for _, p := range [][2]float64{
		{float64(after.VCPUs), float64(c.Node.Allocatable.VCPUs)},
		{float64(after.MemoryMiB), float64(c.Node.Allocatable.MemoryMiB)},
		{float64(after.StorageGiB), float64(c.Node.Allocatable.StorageGiB)},
	} {
		if p[1] > 0 {
			left = min(left, 1-p[0]/p[1])
		}
	}
	return left
}

// tieBreaker returns a hash by which hosts of equal score are ordered. The order differs between VMs, but is always the
// same for one VM.
func tieBreaker(vm cloud.VMID, node cloud.NodeID) uint64 {
	h := fnv.New64a()
	h.Write([]byte(vm))
	h.Write([]byte{0})
	h.Write([]byte(node))
	return h.Sum64()
}

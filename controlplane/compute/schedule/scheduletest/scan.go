// Package scheduletest contains Scan, a simple implementation of schedule.Index.Place that examines every host, and a
// generator of random clouds.
// Tests compare the index with Scan, and the benchmark measures both.
package scheduletest

import (
	"hash/fnv"
	"math"
	"math/bits"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Host is a host of a cloud.
type Host struct {
	Node     cloud.Node
	LastSeen cloud.Time
}

// Scan chooses a host by the rules in the documentation of package schedule. It examines every host. If no host fits,
// it returns the reason for each host.
func Scan(hosts []Host, r *schedule.Request) (chosen cloud.NodeID, refused map[cloud.NodeID]string) {
	refused = map[cloud.NodeID]string{}
	members := map[string]int{}
	for i := range hosts {
		n := &hosts[i].Node
		if value, ok := n.Labels[r.SpreadLabel]; ok && r.SpreadLabel != "" {
			members[value] += r.Spread[n.ID]
		}
	}
	var best []uint64
	for i := range hosts {
		n := &hosts[i].Node
		if why := exclude(&hosts[i], r); why != "" {
			refused[n.ID] = why
			continue
		}
		score := []uint64{uint64(r.AntiAffinitySoft[n.ID]), 0, 0, 20 - level(n, r.Need), ring(string(n.ID)) - ring(string(r.VM))}
		if r.SpreadLabel != "" {
			score[1] = math.MaxUint64
			if value, ok := n.Labels[r.SpreadLabel]; ok {
				score[1] = uint64(members[value])
			}
		}
		if len(r.AffinitySoft) > 0 && r.AffinitySoft[n.ID] == 0 {
			score[2] = 1
		}
		if d := slices.Compare(score, best); best == nil || d < 0 || d == 0 && n.ID < chosen {
			chosen, best = n.ID, score
		}
	}
	return chosen, refused
}

func exclude(h *Host, r *schedule.Request) string {
	n := &h.Node
	if s := n.State(r.Now, h.LastSeen); s != cloud.NodeReady {
		return "is " + s.String()
	}
	if !slices.Contains(n.Hypervisors, cloud.KVM) {
		return "does not report the hypervisor KVM"
	}
	if r.Architecture != cloud.ArchUnspecified && r.Architecture != n.Architecture {
		return "is of another architecture"
	}
	if r.CPUModel != "" && !slices.Contains(n.CPUModels, r.CPUModel) {
		return "does not offer the CPU model " + r.CPUModel
	}
	if why := r.Skip[n.ID]; why != "" {
		return why
	}
	if r.Check != nil {
		if why := r.Check(n); why != "" {
			return why
		}
	}
	if r.On != "" && r.On != n.ID {
		return "is not the host that the VM must be on"
	}
	for k, v := range r.Selector {
		if n.Labels[k] != v {
			return "does not have the labels of the node selector"
		}
	}
	if r.AntiAffinity[n.ID] > 0 {
		return "runs a member of the same anti-affinity group"
	}
	if len(r.Affinity) > 0 && r.Affinity[n.ID] == 0 {
		return "runs no member of the VM's affinity group"
	}
	return schedule.Shortage(n, r.Need)
}

// level returns how many twentieths of the scarcest resource stay free.
func level(n *cloud.Node, need cloud.Capacity) uint64 {
	left := uint64(20)
	for _, r := range [][3]uint64{
		{uint64(n.Allocatable.VCPUs), uint64(n.Allocated.VCPUs), uint64(need.VCPUs)},
		{n.Allocatable.MemoryMiB, n.Allocated.MemoryMiB, need.MemoryMiB},
		{n.Allocatable.StorageGiB, n.Allocated.StorageGiB, need.StorageGiB},
	} {
		size, used, want := r[0], r[1], r[2]
		if size == 0 {
			continue
		}
		free := (size - min(size, used)) * 20 / size
		rounded := size
		for b := 0; b < bits.Len64(size)-4; b++ {
			rounded &^= 1 << b
		}
		left = min(left, free-min(free, want*20/rounded))
	}
	return left
}

func ring(id string) uint64 {
	f := fnv.New64a()
	f.Write([]byte(id))
	x := f.Sum64()
	for _, factor := range []uint64{0xff51afd7ed558ccd, 0xc4ceb9fe1a85ec53} {
		x = (x ^ x>>33) * factor
	}
	return x ^ x>>33
}

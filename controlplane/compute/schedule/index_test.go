package schedule_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/controlplane/compute/schedule/scheduletest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestIndexEqualsScan places random VMs in random clouds whose hosts change, by the index and by the naive Scan. Both
// must choose the same host, and give the same reasons if no host fits. TRIVET_PLACE_SEEDS sets the number of clouds.
func TestIndexEqualsScan(t *testing.T) {
	seeds := 60
	if s := os.Getenv("TRIVET_PLACE_SEEDS"); s != "" {
		var err error
		seeds, err = strconv.Atoi(s)
		require.NoError(t, err)
	}
	placed, refused := 0, 0
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(uint64(seed), 0))
		ix := schedule.NewIndex()
		hosts := make([]scheduletest.Host, 1+rng.IntN([]int{8, 60, 700}[rng.IntN(3)]))
		for i := range hosts {
			hosts[i] = scheduletest.RandomHost(rng, i)
			ix.Put(&hosts[i].Node, hosts[i].LastSeen)
		}
		for i := range 150 {
			r := scheduletest.RandomRequest(rng, i, hosts)
			want, why := scheduletest.Scan(hosts, r)
			got := ix.Place(r)
			require.Equal(t, want, got.Node, "seed %d, request %d: the index chose another host than the scan: %+v", seed, i, r)
			require.Equal(t, got, ix.Place(r), "seed %d, request %d: a repeated request has another result", seed, i)
			if want == "" {
				refused++
				require.Equal(t, why, reasons(got), "seed %d, request %d", seed, i)
			} else {
				placed++
				allocate(ix, hosts, want, r.Need)
			}
			changeHost(rng, ix, hosts)
		}
		require.Equal(t, len(hosts), ix.Len())
	}
	require.Greater(t, placed, 20*seeds, "too few requests fit")
	require.Greater(t, refused, 5*seeds, "too few requests are refused")
}

func reasons(d schedule.Decision) map[cloud.NodeID]string {
	out := map[cloud.NodeID]string{}
	for _, r := range d.Refused {
		out[r.Node] = r.Reason
	}
	return out
}

func allocate(ix *schedule.Index, hosts []scheduletest.Host, id cloud.NodeID, need cloud.Capacity) {
	for i := range hosts {
		if hosts[i].Node.ID == id {
			hosts[i].Node.Allocated = hosts[i].Node.Allocated.Plus(need)
			ix.Allocate(id, need)
		}
	}
}

// changeHost changes a random host, or replaces it by a new one with the same ID, in the index and in hosts.
func changeHost(rng *rand.Rand, ix *schedule.Index, hosts []scheduletest.Host) {
	i := rng.IntN(len(hosts))
	h := &hosts[i]
	switch rng.IntN(5) {
	case 0:
		*h = scheduletest.RandomHost(rng, i)
		if rng.IntN(2) == 0 {
			ix.Remove(h.Node.ID)
		}
		ix.Put(&h.Node, h.LastSeen)
	case 1:
		h.LastSeen = scheduletest.Now
		ix.Seen(h.Node.ID, h.LastSeen)
	case 2:
		used := h.Node.Allocated
		freed := cloud.Capacity{VCPUs: used.VCPUs / 2, MemoryMiB: used.MemoryMiB / 2, StorageGiB: used.StorageGiB / 2}
		h.Node.Allocated = h.Node.Allocated.Minus(freed)
		ix.Free(h.Node.ID, freed)
	case 3:
		h.Node.Cordoned = !h.Node.Cordoned
		ix.Put(&h.Node, h.LastSeen)
	}
}

// TestSpreadOfIdenticalHosts places as many VMs as there are identical hosts. The hosts must fill evenly.
func TestSpreadOfIdenticalHosts(t *testing.T) {
	ix := schedule.NewIndex()
	for i := range 100 {
		n := cloud.Node{
			ID: cloud.NodeID(fmt.Sprint("n", i)), Declared: cloud.NodeReady, Hypervisors: []cloud.Hypervisor{cloud.KVM},
			Allocatable: cloud.Capacity{VCPUs: 40, MemoryMiB: 1 << 20},
		}
		ix.Put(&n, scheduletest.Now)
	}
	count := map[cloud.NodeID]int{}
	for i := range 1000 {
		need := cloud.Capacity{VCPUs: 2}
		d := ix.Place(&schedule.Request{VM: cloud.VMID(fmt.Sprint("v", i)), Now: scheduletest.Now, Need: need})
		ix.Allocate(d.Node, need)
		count[d.Node]++
	}
	require.Len(t, count, 100)
	for id, n := range count {
		require.Equal(t, 10, n, "VMs on %s", id)
	}
}

// TestBaselineCPU checks which hosts count: those that can run VMs, those of the architecture, and those with KVM if
// there are any.
func TestBaselineCPU(t *testing.T) {
	ix := schedule.NewIndex()
	put := func(id string, change func(*cloud.Node), models ...string) {
		n := &cloud.Node{ID: cloud.NodeID(id), Declared: cloud.NodeReady, Architecture: cloud.X8664, CPUModels: models,
			Labels: map[string]string{cloud.AcceleratorLabel: cloud.AcceleratorKVM}}
		if change != nil {
			change(n)
		}
		ix.Put(n, 0)
	}
	put("tcg", func(n *cloud.Node) { n.Labels = nil }, "max", "Nehalem-v1")
	require.Equal(t, "max", ix.BaselineCPU(cloud.X8664))
	put("kvm", nil, "host", "Haswell-v4", "Nehalem-v1")
	require.Equal(t, "Haswell-v4", ix.BaselineCPU(cloud.X8664))
	put("broken", func(n *cloud.Node) { n.Declared = cloud.NodeNotReady }, "host", "Nehalem-v1")
	put("arm", func(n *cloud.Node) { n.Architecture = cloud.AArch64 }, "host")
	require.Equal(t, "Haswell-v4", ix.BaselineCPU(cloud.X8664))
	require.Empty(t, ix.BaselineCPU(cloud.AArch64))
	put("old", nil, "host", "Nehalem-v1")
	require.Equal(t, "Nehalem-v1", ix.BaselineCPU(cloud.X8664))
	ix.Remove("old")
	require.Equal(t, "Haswell-v4", ix.BaselineCPU(cloud.X8664))
}

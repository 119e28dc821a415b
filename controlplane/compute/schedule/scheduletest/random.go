package scheduletest

import (
	"fmt"
	"math/rand/v2"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Now is the time of the requests that RandomRequest returns.
const Now cloud.Time = 1_000_000

// RandomHost returns the host number i. Its properties are random: most hosts are READY, and the hosts have several
// sizes, racks, CPU models and amounts of allocated capacity.
func RandomHost(rng *rand.Rand, i int) Host {
	size := []cloud.Capacity{
		{VCPUs: 64, MemoryMiB: 256 << 10, StorageGiB: 4096}, {VCPUs: 128, MemoryMiB: 512 << 10, StorageGiB: 2048},
		{VCPUs: 16, MemoryMiB: 64 << 10, StorageGiB: 500}, {VCPUs: 8, MemoryMiB: 16 << 10},
	}[rng.IntN(4)]
	size.MemoryMiB -= rng.Uint64N(512) // hosts of one model differ a little
	name := fmt.Sprint("host-", i)
	h := Host{LastSeen: Now - cloud.Time(rng.Int64N(10_000)), Node: cloud.Node{
		ID: cloud.NodeID(fmt.Sprintf("00000000-0000-7000-a000-%012d", i)), Name: name, Capacity: size, Allocatable: size, Declared: cloud.NodeReady,
		Hypervisors: []cloud.Hypervisor{cloud.KVM}, Architecture: cloud.X8664, CPUModels: []string{"EPYC", "qemu64"},
		Labels: map[string]string{"host": name, "rack": fmt.Sprint("r", rng.IntN(12))},
	}}
	n := &h.Node
	if rng.IntN(2) == 0 {
		n.Allocated = cloud.Capacity{
			VCPUs: rng.Uint32N(size.VCPUs + 2), MemoryMiB: rng.Uint64N(size.MemoryMiB + 1), StorageGiB: rng.Uint64N(size.StorageGiB + 1),
		}
	}
	switch rng.IntN(20) {
	case 0:
		n.Cordoned = true
	case 1:
		h.LastSeen = Now - 2*cloud.HeartbeatTimeout
	case 2:
		n.Declared = cloud.NodeNotReady
	case 3:
		n.Hypervisors = nil
	case 4:
		n.Architecture = cloud.AArch64
	case 5:
		n.CPUModels = []string{"qemu64"}
	case 6:
		delete(n.Labels, "rack")
	case 7:
		n.Labels["disk"] = "ssd"
	}
	return h
}

// RandomRequest returns the request of the VM number i. It has some of the requirements and preferences that a VM can
// have.
func RandomRequest(rng *rand.Rand, i int, hosts []Host) *schedule.Request {
	vcpus := uint32(1) << rng.IntN(5)
	r := &schedule.Request{
		VM: cloud.VMID(fmt.Sprintf("00000000-0000-7000-8000-%012d", i)), Now: Now,
		Need: cloud.Capacity{VCPUs: vcpus, MemoryMiB: uint64(vcpus) << (9 + rng.IntN(4)), StorageGiB: rng.Uint64N(40)},
	}
	some := func() map[cloud.NodeID]int {
		out := map[cloud.NodeID]int{"removed": 1}
		for range rng.IntN(5) {
			out[hosts[rng.IntN(len(hosts))].Node.ID] += 1 + rng.IntN(2)
		}
		return out
	}
	if rng.IntN(4) == 0 {
		r.Need.StorageGiB = 0
	}
	if rng.IntN(2) == 0 {
		r.Architecture = cloud.X8664
	}
	if rng.IntN(4) == 0 {
		r.CPUModel = []string{"EPYC", "qemu64", "Itanium"}[rng.IntN(3)]
	}
	if rng.IntN(5) == 0 {
		name := hosts[rng.IntN(len(hosts))].Node.Name
		r.Selector = []map[string]string{{"host": name}, {"disk": "ssd"}, {"rack": "r3"}, {"rack": ""}, {"host": name, "rack": "r1"}}[rng.IntN(5)]
	}
	if rng.IntN(3) == 0 {
		r.AntiAffinity = some()
	}
	if rng.IntN(8) == 0 {
		r.Affinity = some()
	}
	if rng.IntN(3) == 0 {
		r.AntiAffinitySoft = some()
	}
	if rng.IntN(3) == 0 {
		r.AffinitySoft = some()
	}
	if rng.IntN(3) == 0 {
		r.SpreadLabel, r.Spread = []string{"rack", "host", "row"}[rng.IntN(3)], some()
	}
	if rng.IntN(6) == 0 {
		r.Check = func(n *cloud.Node) string {
			if ring(string(n.ID))%3 == 0 {
				return "has no network"
			}
			return ""
		}
	}
	if rng.IntN(10) == 0 {
		r.On = hosts[rng.IntN(len(hosts))].Node.ID
	}
	if rng.IntN(6) == 0 {
		r.Skip = map[cloud.NodeID]string{hosts[rng.IntN(len(hosts))].Node.ID: "is full"}
	}
	return r
}
